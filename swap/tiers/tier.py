"""Interface between the engine and a tier: extents that bytes are copied to and from, under a budget.

An extent is written once, may be read many times, and is released once; its holder owns the bytes. Budgets are hard (R8):
`reserve` returns None when a tier is full, and a tier never takes more than its budget.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

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


class Tier(Protocol):
    """Memory with a budget. Not thread-safe: callers hold the engine lock.

    Attributes:
        name: device, host or disk.
        lane_out, lane_in: the trace's lanes for its copies.
        budget: bytes; None: unlimited.
        used, peak: bytes reserved now, and the most so far.
    """

    name: TierName
    lane_out: Lane
    lane_in: Lane
    budget: int | None
    used: int
    peak: int

    @property
    def obtainable(self) -> int | None:
        """The budget, without what other jobs hold of it now; None: unlimited."""

    @property
    def free(self) -> int | None:
        """Bytes of further extents that have room if no gap between others is too small; None: unlimited."""

    @property
    def refusal(self) -> str | None:
        """Reason why it did not grow to its budget; None without one."""

    def reserve(self, nbytes: int) -> Extent | None:
        """Reserves `nbytes`; None when the tier is full."""

    def write(self, extent: Extent, source: torch.Tensor, *, after: Event) -> Timed:
        """Issues the copy of all of `source`, on the device, to an extent, once `after` is done."""

    def read(self, extent: Extent, target: torch.Tensor, *, after: Event) -> Timed:
        """Issues the copy of an extent to `target`, on the device, once `after` is done."""

    def release(self, extent: Extent) -> None:
        """Gives the room back; no copy may be in flight."""

    def expect(self, nbytes: int) -> None:
        """Announces the most bytes that later steps will hold, by plan; 0: unknown."""

    def end_step(self) -> None:
        """Ends a step, all of whose extents have been released."""

    def close(self) -> None:
        """Waits for pending copies and gives the memory back."""
