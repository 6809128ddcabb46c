"""Layer calls of one step and the order in which backward is expected to reach them (R7); drives prefetch.

It owns the calls' numbering, the storages that each call saved, and the expected order: that of the step before, or of the
pipeline's schedule before the first step. Where neither is known it is the reverse of the forward order, which is wrong
across the microbatches of a pipeline.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from weakref import ref

    import torch
    from torch import nn

    from memo.swap.engine.saved_storage import Hold, SavedStorage
    from memo.swap.engine.trace_events import Began
    from memo.swap.placement import Quota

Call = tuple[int, int]
"""Layer number, and how often that layer was called before in the step."""


class Group:
    """Storages saved by one call of one layer.

    Args:
        index: position in the forward order since the engine was last empty.
        key: the call.
        module: name of the layer.
        wait_for_next: copies out begin only when another layer follows.
    """

    __slots__ = (
        "alive",
        "began",
        "external",
        "has_ended",
        "held",
        "hidden_values",
        "index",
        "is_lost",
        "key",
        "may_lack_room",
        "module",
        "modules",
        "nbytes",
        "quota",
        "recomputed_for_room",
        "replayed_nbytes",
        "saved",
        "together",
        "wait_for_next",
    )

    def __init__(self, index: int, key: Call, module: str, *, wait_for_next: bool) -> None:
        self.index = index
        self.key = key
        self.module = module
        self.wait_for_next = wait_for_next
        self.held = False  # copies out begin only when it is decided what of each storage moves (Engine.copy_out_held)
        self.together = False  # other ranks recompute it at the same place in their backward
        self.saved: list[ref[Hold]] = []
        self.alive = 0  # storages that still have handles
        self.is_lost = False  # its storages are counted no more (Engine.recover)
        self.nbytes = 0  # of all storages so far
        self.has_ended = False  # the layer's forward
        self.external: set[torch.UntypedStorage] = set()  # of the layer's arguments but its hidden states: these stay
        self.modules: Sequence[nn.Module] = ()  # that run in it: what their parameters hold at the time stays
        self.hidden_values = 0  # of the hidden states that the layer was called with; counted where a codec is chosen
        self.quota: Quota | None = None  # bytes due to each tier; None: the first tier with room
        self.may_lack_room = False  # tiers and device may be too full for what the call saves
        self.recomputed_for_room = False  # what it saves is less than the layer's setting says
        self.replayed_nbytes = 0  # of the storages that replays give
        self.began: Began | None = None  # begin of its forward, where there is a trace

    def living(self) -> list[SavedStorage]:
        """Storages that still have handles, in the order of their saves."""
        return [hold.saved for weak in self.saved if (hold := weak()) is not None]


class LayerCalls:
    """Groups with living storages, and the group whose forward is running. Iterates over the groups in forward order."""

    def __init__(self) -> None:
        self.open: Group | None = None
        """Its forward is running, or has just ended; takes what is saved now."""
        self.reading: Group | None = None
        """Reached last by backward."""
        self._groups: dict[int, Group] = {}
        self._by_call: dict[Call, Group] = {}
        self._begun = 0
        self._calls: collections.Counter[int] = collections.Counter()
        self._expected: Sequence[Call] = ()
        self._last_at: dict[Call, int] = {}  # last position of each call in the expected order
        self._position = 0  # in the expected order: of the next call to be reached
        self._as_expected = False  # the group reached last was in the expected order
        self._observed: list[Call] = []

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def expect(self, order: Sequence[Call]) -> None:
        """Sets the order in which backward will reach the calls of the next step. A call may occur more than once."""
        self._expected, self._position = tuple(order), 0
        self._last_at = {call: at for at, call in enumerate(self._expected)}

    @property
    def any_living(self) -> bool:
        """True while a storage has handles, whatever was counted of it."""
        return any(weak() is not None for group in self for weak in group.saved)

    def begin(self, layer: int, module: str, *, wait_for_next: bool) -> Group:
        """Opens the group of a call that begins now."""
        group = Group(self._begun, (layer, self._calls[layer]), module, wait_for_next=wait_for_next)
        self._calls[layer] += 1
        self._begun += 1
        self._groups[group.index] = self._by_call[group.key] = group
        return group

    def forget(self, group: Group) -> None:
        """Removes a group of which nothing is alive."""
        if self._groups.get(group.index) is group:  # else of an earlier step, whose numbers are used again
            del self._groups[group.index]
            self._by_call.pop(group.key, None)

    def end_step(self) -> None:
        """Restarts the numbering once nothing is alive; the order that backward took is expected of the next step."""
        if self._observed:
            self.expect(self._observed)
        self._observed = []
        self._position, self._as_expected = 0, False
        self._groups.clear()
        self._by_call.clear()
        self._calls.clear()
        self._begun = 0
        self.reading = None

    def reached(self, group: Group) -> None:
        """Records that backward has reached `group`."""
        self.reading = group
        self._observed.append(group.key)
        try:
            self._position = self._expected.index(group.key, self._position) + 1
            self._as_expected = True
        except ValueError:
            self._as_expected = False

    def comes_again(self, group: Group) -> bool:
        """True if backward, which has just left `group`, comes back to it later: a split backward is half done."""
        if not self._as_expected or self._last_at.get(group.key, -1) < self._position:
            return False
        return self._expected[self._position] != group.key

    def after(self, group: Group) -> Iterator[Group]:
        """Groups that backward is expected to reach after `group`, in order.

        By the expected order up to a call whose forward has not begun; without one, in the reverse of the forward order.
        """
        if self._as_expected and self._position < len(self._expected):
            yield from self.upcoming()
            return
        for index in range(group.index - 1, -1, -1):
            earlier = self._groups.get(index)
            if earlier is not None and earlier.alive:
                yield earlier

    def may_come_next(self, group: Group) -> bool:
        """False where the expected order says that backward reaches another group first, as in a pipeline.

        What is still alive does not count, so that ranks that recompute a layer together decide alike.
        """
        if self._position == len(self._expected):
            return True
        layer, number = self._expected[self._position]
        return number >= self._calls[layer] or (layer, number) == group.key

    def upcoming(self) -> Iterator[Group]:
        """Groups that the expected order says backward reaches next, up to a call whose forward has not begun."""
        for at in range(self._position, len(self._expected)):
            layer, number = self._expected[at]
            if number >= self._calls[layer]:
                return
            expected = self._by_call.get((layer, number))
            if expected is not None and expected.alive:
                yield expected
