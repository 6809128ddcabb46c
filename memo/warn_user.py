"""Warnings that point at the user's line: the innermost call that is neither memo's nor of the libraries that it hooks."""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = "memo torch transformers peft accelerate trl lightning pytorch_lightning deepspeed".split()  # noqa: SIM905


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the innermost line outside of memo and training libraries; at the caller's where there is none (autograd)."""
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        if frame.f_back is None:
            level = 2
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
