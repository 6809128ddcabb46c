"""Interface between the engine and a tier: places that bytes are copied to and from, under a budget.

A tier hands out places. A place is written once, may be read many times, and is released once; its holder owns the bytes.
Budgets are hard (R8): `claim` returns None when a tier is full, and a tier never takes more than its budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from memo.events import Lane, Tier as TierName
    from memo.swap.backends.protocol import Event, Timed

__all__ = ["Place", "Tier"]


class Place(Protocol):
    """Room for one storage in a tier."""

    @property
    def tier(self) -> Tier:
        """The tier of the room."""

    def copy_out(self, source: torch.Tensor, *, after: Event) -> Timed:
        """Issues the copy from the device to here, once `after` is done."""

    def copy_in(self, target: torch.Tensor, *, after: Event) -> Timed:
        """Issues the copy from here to the device, once `after` is done."""

    def release(self) -> None:
        """Gives the room back; no copy may be in flight."""


class Tier(Protocol):
    """Memory with a budget. Not thread-safe: callers hold the engine lock.

    Attributes:
        name: device, host or disk.
        lane_out, lane_in: the trace's lanes for its copies.
        budget: bytes; None: unlimited.
        used, peak: bytes claimed now, and the most so far.
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
        """Bytes of further claims that have room if no gap between others is too small; None: unlimited."""

    @property
    def refusal(self) -> str | None:
        """Reason why it did not grow to its budget; None without one."""

    def claim(self, nbytes: int) -> Place | None:
        """Returns room for `nbytes`; None when the tier is full."""

    def expect(self, nbytes: int) -> None:
        """Announces the most bytes that later steps will hold, by plan; 0: unknown."""

    def end_step(self) -> None:
        """Ends a step, all of whose places have been released."""

    def close(self) -> None:
        """Waits for pending copies and gives the memory back."""
