"""For tests that collect garbage again and again, to see what dies."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

__all__ = ["quick_collections"]


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """What earlier tests and imports left is not looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
