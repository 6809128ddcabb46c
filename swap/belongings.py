"""What a layer's modules hold besides parameters and buffers: a forward that changes it must not run again.

A tensor put aside for somebody to find, as a router's loss, or one more item of a list: a second run would put its own
there, of some tokens only and of a graph that nobody may walk. Plain attributes are watched by the surroundings, until
backward; this looks from a forward's begin to its end. Not seen: what is neither an attribute nor in a container that is
one.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Belongings"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_COMPARED_BY_VALUE = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS = (list, dict, set, collections.deque)


class Belongings:
    """Of a layer, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = list(_belongings(module))

    def changed(self) -> str | None:
        """The first that is another now."""
        now = list(_belongings(self._module))
        if len(now) != len(self._before):
            return "the set of its modules' attributes"
        for (name, was, held), (_, is_, holds) in zip(self._before, now, strict=True):
            if was is not is_ or len(held) != len(holds) or any(a is not b for a, b in zip(held, holds, strict=True)):
                return f"attribute {name!r} of a module"
        return None


def _belongings(module: nn.Module) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name and value of each attribute, and what is in it."""
    for child in module.modules():
        for name, value in vars(child).items():
            if name not in _OF_EVERY_MODULE and type(value) not in _COMPARED_BY_VALUE:
                held = (
                    tuple(value.values() if isinstance(value, dict) else value)
                    if isinstance(value, _CONTAINERS)
                    else ()
                )
                yield name, value, held
