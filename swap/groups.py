"""The calls of layers in the step under way, and in which order backward comes to them (R7).

It owns their numbering and the order observed in the step before. "Reverse of the forward" alone is wrong across the
microbatches of a pipeline: it is the guess where nothing was observed.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from memo.swap.saved import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Groups"]

_Key = tuple[int, int]  # layer, and how often it was called before


class Groups:
    """The groups with living storages, and those whose forward is under way."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._begun = 0
        self._calls: collections.Counter[int] = collections.Counter()
        self._order_before: dict[_Key, _Key] = {}
        self._order_now: list[_Key] = []

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def begin(self, layer: int, module: str, *, wait_for_next: bool) -> Group:
        """The group of a call that begins now."""
        group = Group(self._begun, (layer, self._calls[layer]), module, wait_for_next=wait_for_next)
        self._calls[layer] += 1
        self._begun += 1
        self._groups[group.index] = group
        return group

    def forget(self, group: Group) -> None:
        """Nothing of it lives any more."""
        self._groups.pop(group.index, None)

    def end_step(self) -> None:
        """Nothing lives: numbers start anew, and the order that backward took is what to expect."""
        if self._order_now:
            self._order_before = dict(zip(self._order_now, self._order_now[1:], strict=False))
        self._order_now = []
        self._groups.clear()
        self._calls.clear()
        self._begun = 0

    def reached(self, group: Group) -> None:
        """Backward has come to `group`."""
        self._order_now.append(group.key)

    def following(self, group: Group) -> Group | None:
        """The group that backward will reach next: as in the step before, else the nearest earlier one in forward order."""
        key = self._order_before.get(group.key)
        if key is not None:
            for other in self:
                if other.key == key and other.alive:
                    return other
        for index in range(group.index - 1, -1, -1):
            earlier = self._groups.get(index)
            if earlier is not None and earlier.alive:
                return earlier
        return None
