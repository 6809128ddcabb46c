"""Base of tiers, and the interface between the engine and one: extents that bytes are copied to and from, under a budget.

An extent is written once, may be read many times, and is released once; its holder owns the bytes. Budgets are hard (R8):
`reserve` returns None when a tier is full, and a tier never takes more than its budget.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    import torch

    from memo.events import Lane, TierName as TierName
    from memo.swap.backends.protocol import Event, Timed


@dataclasses.dataclass(slots=True, eq=False, weakref_slot=True)
class Extent:
    """Room for one storage in a tier."""

    tier: Tier
    nbytes: int
    room: Any = None
    """Part of the tier's memory, in a form that the tier alone reads."""


class Tier(abc.ABC):
    """Memory with a budget, and the count of the bytes that it holds. Not thread-safe: callers hold the engine lock.

    Its references to extents are weak: `forget_lost` counts out one whose release was interrupted, once nobody holds it.

    Args:
        budget: bytes; None: unlimited.

    Attributes:
        name: device, host or disk.
        lane_out, lane_in: the trace's lanes for its copies.
        used, peak: bytes reserved now, and the most so far.
    """

    name: TierName
    lane_out: Lane
    lane_in: Lane

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.used = 0
        self.peak = 0
        self._extents: dict[int, ref[Extent]] = {}  # by identity

    @property
    def obtainable(self) -> int | None:
        """The budget, without what other jobs hold of it now; None: unlimited."""
        return self.budget

    @property
    def free(self) -> int | None:
        """Bytes of further extents that have room if no gap between others is too small; None: unlimited."""
        return None if self.obtainable is None else max(0, self.obtainable - self.used)

    @property
    def refusal(self) -> str | None:
        """Reason why it did not grow to its budget; None without one."""
        return None

    @abc.abstractmethod
    def reserve(self, nbytes: int) -> Extent | None:
        """Reserves `nbytes`; None when the tier is full."""

    @abc.abstractmethod
    def write(self, extent: Extent, source: torch.Tensor, *, after: Event) -> Timed:
        """Issues the copy of all of `source`, on the device, to an extent, once `after` is done."""

    @abc.abstractmethod
    def read(self, extent: Extent, target: torch.Tensor, *, after: Event) -> Timed:
        """Issues the copy of an extent to `target`, on the device, once `after` is done."""

    def release(self, extent: Extent) -> None:
        """Gives the room back; no copy may be in flight."""
        self._count_out(extent)

    def expect(self, nbytes: int) -> None:  # noqa: B027 - most tiers have no use for it
        """Announces the most bytes that later steps will hold, by plan; 0: unknown."""

    def end_step(self) -> None:
        """Ends a step, all of whose extents have been released."""
        self.forget_lost()

    def close(self) -> None:  # noqa: B027 - a tier without memory of its own has nothing to give back
        """Waits for pending copies and gives the memory back."""

    def _count(self, extent: Extent) -> Extent:
        """Counts the bytes of a reserved extent, and returns it."""
        self._extents[id(extent)] = ref(extent)
        self.used += extent.nbytes
        self.peak = max(self.peak, self.used)
        return extent

    def _count_out(self, extent: Extent) -> bool:
        """Counts out the bytes of a released extent; False if `forget_lost` has done so."""
        if self._extents.pop(id(extent), None) is None:
            return False
        self.used -= extent.nbytes
        return True

    def forget_lost(self) -> list[Extent]:
        """Counts out extents that were freed without a release. Returns those that are left."""
        held = [extent for weak in self._extents.values() if (extent := weak()) is not None]
        self._extents = {id(extent): ref(extent) for extent in held}
        self.used = sum(extent.nbytes for extent in held)
        return held
