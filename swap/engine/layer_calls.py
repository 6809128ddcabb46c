"""Layer calls of one step and the order in which backward is expected to reach them (R7); drives prefetch.

It owns the calls' numbering and the expected order: that of the step before, or at first what a pipeline's schedule says.
"Reverse of the forward" alone is wrong across the microbatches of a pipeline: it is the guess where nothing is known.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from memo.swap.engine.saved_storage import Group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Call", "LayerCalls"]

Call = tuple[int, int]
"""A layer, and how often it was called before in the step."""


class LayerCalls:
    """The groups with living storages, and those whose forward is under way."""

    def __init__(self) -> None:
        self.open: Group | None = None
        """Whose forward is under way, or has just ended: what is saved now belongs to it."""
        self.reading: Group | None = None
        """The latest that backward came to."""
        self._groups: dict[int, Group] = {}
        self._by_call: dict[Call, Group] = {}
        self._begun = 0
        self._calls: collections.Counter[int] = collections.Counter()
        self._expected: Sequence[Call] = ()
        self._last_at: dict[Call, int] = {}
        self._come = 0
        """How much of the expected order has come true; the rest is to come."""
        self._on_course = False
        """The group that backward reached last was expected."""
        self._order_now: list[Call] = []

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def expect(self, order: Sequence[Call]) -> None:
        """The order in which backward will reach the calls of the step to come. A call may come more than once."""
        self._expected, self._come = tuple(order), 0
        self._last_at = {call: at for at, call in enumerate(self._expected)}

    def begin(self, layer: int, module: str, *, wait_for_next: bool) -> Group:
        """The group of a call that begins now."""
        group = Group(self._begun, (layer, self._calls[layer]), module, wait_for_next=wait_for_next)
        self._calls[layer] += 1
        self._begun += 1
        self._groups[group.index] = self._by_call[group.key] = group
        return group

    def forget(self, group: Group) -> None:
        """Nothing of it lives any more."""
        self._groups.pop(group.index, None)
        self._by_call.pop(group.key, None)

    def end_step(self) -> None:
        """Nothing lives: numbers start anew, and the order that backward took is what to expect."""
        if self._order_now:
            self.expect(self._order_now)
        self._order_now = []
        self._come, self._on_course = 0, False
        self._groups.clear()
        self._by_call.clear()
        self._calls.clear()
        self._begun = 0
        self.reading = None

    def reached(self, group: Group) -> None:
        """Backward has come to `group`."""
        self.reading = group
        self._order_now.append(group.key)
        try:
            self._come = self._expected.index(group.key, self._come) + 1
            self._on_course = True
        except ValueError:
            self._on_course = False

    def comes_again(self, group: Group) -> bool:
        """Backward is to come back to a group that it has just left, and not at once: half of its backward is done."""
        if not self._on_course or self._last_at.get(group.key, -1) < self._come:
            return False
        return self._expected[self._come] != group.key

    def after(self, group: Group) -> Iterator[Group]:
        """What backward will reach next, one after the other.

        As expected, up to a call that is still to be made; where nothing is expected, back through the forward's order.
        """
        if self._on_course and self._come < len(self._expected):
            yield from self.upcoming()
            return
        for index in range(group.index - 1, -1, -1):
            earlier = self._groups.get(index)
            if earlier is not None and earlier.alive:
                yield earlier

    def upcoming(self) -> Iterator[Group]:
        """What backward is expected to reach next, one after the other, up to a call that is still to be made."""
        for at in range(self._come, len(self._expected)):
            layer, number = self._expected[at]
            if number >= self._calls[layer]:
                return
            expected = self._by_call.get((layer, number))
            if expected is not None and expected.alive:
                yield expected
