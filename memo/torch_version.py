"""Refusal of a torch that is too old, before any module of memo asks it for what it lacks.

Owns the number, which pyproject.toml repeats.
"""

from __future__ import annotations

import importlib.metadata
import re

LEAST_TORCH = (2, 11)


def require_torch() -> None:
    """Does nothing where torch is new enough, or says no version.

    Raises:
        ImportError: torch is too old.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return  # not installed, or built without metadata
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[: len(LEAST_TORCH)])
    if numbers < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ImportError(f"memo needs torch {least} or newer, and this is torch {version}: pip install -U torch")
