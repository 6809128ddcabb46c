"""Python lines of the program that saves a tensor: the innermost frames outside torch and memo.

The GPT of `memo.gpt` is a program like any other, and its lines are shown.
"""

from __future__ import annotations

import os
import sys

MOST_LINES = 3


def python_lines() -> str | None:
    """Returns up to MOST_LINES lines of the calling thread, innermost first, as `model/layer.py:12 forward`.

    Returns:
        The lines, separated by ` < `; None where the thread runs nothing but torch and memo.
    """
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < MOST_LINES:
        if _is_of_the_program(frame.f_globals.get("__name__", "")):
            code = frame.f_code
            folder, name = os.path.split(code.co_filename)
            found.append(f"{os.path.basename(folder)}/{name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or None


def _is_of_the_program(module: str) -> bool:
    package = module.partition(".")[0]
    return package not in ("torch", "memo") or module.startswith("memo.gpt.model")
