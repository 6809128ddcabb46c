"""Arguments and results of modules, nested lists, tuples and dicts, also ones that hold themselves; what closures hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields the leaves of nested lists, tuples and dicts, in order. What holds itself, or occurs twice, is read once."""
    open_, seen = [iter((value,))], set()
    while open_:
        for item in open_[-1]:
            if not isinstance(item, (tuple, list, dict)):
                yield item
            elif id(item) not in seen:
                seen.add(id(item))
                open_.append(iter(item.values() if isinstance(item, dict) else item))
                break
        else:
            open_.pop()


def closure_of(function: Any) -> list[Any]:
    """Values in a function's closure, of the cells that are filled."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            found.append(cell.cell_contents)
    return found
