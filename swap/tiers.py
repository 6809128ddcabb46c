"""Where bytes can rest outside the device: the host arena and the disk, behind one interface.

A tier hands out places. A place is written once, may be read many times, and is given back once; who holds a place owns
its bytes. Budgets are hard (R8): `claim` answers None when a tier is full, and never takes more than it was given.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from memo.swap.freelist import FreeList
from memo.swap.layout import StepRecorder
from memo.trace.events import Lane
from memo.trace.events import Tier as TierName

if TYPE_CHECKING:
    import torch

    from memo.swap.backend import Backend, Disk, Event, Extent, Timed

__all__ = ["DiskTier", "HostTier", "Place", "Tier"]

PAGE = 4096


class Place(Protocol):
    """Room for one storage in a tier."""

    @property
    def tier(self) -> Tier: ...

    def leave(self, source: torch.Tensor, *, after: Event) -> Timed:
        """Issues the copy from the device to here, once `after` is done."""

    def enter(self, target: torch.Tensor, *, after: Event) -> Timed:
        """Issues the copy from here to the device, once `after` is done."""

    def release(self) -> None:
        """Gives the room back; no copy may be pending."""


class Tier(Protocol):
    """A kind of room with a budget."""

    name: TierName
    lane_out: Lane
    lane_in: Lane
    budget: int | None
    used: int
    peak: int

    def claim(self, nbytes: int) -> Place | None:
        """Room for `nbytes`, or None when the tier is full."""

    def expect(self, nbytes: int) -> None:
        """Steps from now on need so many bytes at a time, by plan; 0: nobody knows."""

    def end_step(self) -> None:
        """Every place has been given back: a step is over."""

    def close(self) -> None: ...


class _Ledger:
    """Counts what a tier holds."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.used = 0
        self.peak = 0

    def take(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)


class HostTier(_Ledger):
    """Host arena: exact-size segments, together never above the budget.

    A segment that the system refuses is raised as the backend raised it, and counted nowhere.

    Segments are taken when they are first needed, since locking pages costs about 0.3 s per GiB and a small model should
    not pay for a large budget. A storage never spans two segments: a copy across two page-lock registrations fails.
    The first step is divided by first fit; from then on one segment of the planned size serves the planned offsets.
    Where it is known what steps need, one segment of that size serves them all: what several of them leave at their ends
    would be missed in a budget that a plan fills.
    """

    name = TierName.HOST
    lane_out = Lane.D2H
    lane_in = Lane.H2D

    def __init__(self, backend: Backend, budget: int, *, segment_bytes: int = 1 << 30) -> None:
        super().__init__(budget)
        self._backend = backend
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []
        self.reserved = 0
        self._recorder = StepRecorder()
        self._refused = False  # in this step, for want of room
        self._expected = 0
        self._begins_anew = False  # what is known of steps before is of no use to the next one
        self._reloads = 0
        self._left: tuple[int, Event] | None = None  # the latest reload out of room that has been given back since

    def expect(self, nbytes: int) -> None:
        if nbytes or self._expected:
            self._expected = min(_pages(nbytes), self._capacity)
            self._begins_anew = True

    def claim(self, nbytes: int) -> Place | None:
        if self._begins_anew and not self.used:
            self._begin_anew()
        number, planned = self._recorder.claim(nbytes)
        place = self._claim(nbytes, number, planned)
        self._refused |= place is None
        return place

    def _claim(self, nbytes: int, number: int, planned: int | None) -> Place | None:
        if planned is not None:
            segment = self._segments[0]
            if planned + nbytes <= segment.free.capacity and segment.free.allocate_at(planned, nbytes):
                return self._place(segment, planned, nbytes, number)
            self._recorder.missed()
        for segment in self._segments:
            offset = segment.free.allocate(nbytes)
            if offset is not None:
                return self._place(segment, offset, nbytes, number)
        segment_bytes = max(_pages(nbytes), self._expected or self._segment_bytes)
        room = self._capacity - self.reserved
        if _pages(nbytes) > room:
            return None
        segment = self._add_segment(min(room, segment_bytes))
        offset = segment.free.allocate(nbytes)
        assert offset is not None
        return self._place(segment, offset, nbytes, number)

    def end_step(self) -> None:
        """Nothing is held: plans the next step, and takes one segment of just the planned size for it."""
        refused, self._refused = self._refused, False
        if self._begins_anew or not self._recorder.end_step(PAGE, self._capacity):
            return
        # Where the step did not fit, the whole budget is worth having: what the plan leaves may take other claims.
        wanted = self._capacity if refused else max(self._recorder.nbytes, self._expected)
        if not self._serves(wanted):
            self._drop_segments()
            self._add_segment(wanted)

    @property
    def _capacity(self) -> int:
        return (self.budget or 0) // PAGE * PAGE

    def _begin_anew(self) -> None:
        if not self._serves(self._expected):
            self._drop_segments()
        self._recorder = StepRecorder()
        self._begins_anew = False

    def _serves(self, nbytes: int) -> bool:
        """One segment is all there is, of this size; or larger, where plans follow one another: locking pages takes long."""
        if len(self._segments) != 1:
            return False
        capacity = self._segments[0].free.capacity
        return capacity == nbytes or (self._expected > 0 and capacity > nbytes)

    def _drop_segments(self) -> None:
        if self._segments:
            self._backend.synchronize()  # a copy that only the device has ordered may still use them
        self._segments.clear()
        self.reserved = 0

    def _add_segment(self, nbytes: int) -> _Segment:
        segment = _Segment(self._backend.empty_host(nbytes), FreeList(nbytes, align=PAGE))
        self._segments.append(segment)
        self.reserved += nbytes
        return segment

    def _place(self, segment: _Segment, offset: int, nbytes: int, number: int) -> Place:
        self.take(nbytes)
        return _HostPlace(self, segment, offset, nbytes, number)

    def give_back(
        self, segment: _Segment, offset: int, nbytes: int, number: int, step: int, reload: tuple[int, Event] | None
    ) -> None:
        segment.free.free(offset)
        if reload is not None and (self._left is None or self._left[0] < reload[0]):
            self._left = reload
        self.used -= nbytes
        self._recorder.release(number, step)

    @property
    def step(self) -> int:
        """The recorder's step, which a place remembers."""
        return self._recorder.step

    def copy_out(self, block: torch.Tensor, source: torch.Tensor, after: Event) -> Timed:
        self._after_reloads()
        self._backend.d2h.wait(after)
        return self._backend.d2h.copy(block, source)

    def _after_reloads(self) -> None:
        """E7: reloads run in order, so the latest one that left room free speaks for those before it.

        With one compute stream E4, the program's order and E1 say as much; what is saved on another has not waited for E4.
        """
        if self._left is not None:
            self._backend.d2h.wait(self._left[1])
            self._left = None

    def copy_in(self, target: torch.Tensor, block: torch.Tensor, after: Event) -> tuple[int, Timed]:
        """The reload's number, and its event."""
        self._backend.h2d.wait(after)
        self._reloads += 1
        return self._reloads, self._backend.h2d.copy(target, block)

    def close(self) -> None:
        self._segments.clear()
        self.reserved = 0


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    memory: torch.Tensor
    free: FreeList


class _HostPlace:
    __slots__ = ("_block", "_number", "_offset", "_reload", "_segment", "_step", "tier")

    def __init__(self, tier: HostTier, segment: _Segment, offset: int, nbytes: int, number: int) -> None:
        self.tier = tier
        self._segment = segment
        self._offset = offset
        self._block = segment.memory[offset : offset + nbytes]
        self._number = number
        self._step = tier.step
        self._reload: tuple[int, Timed] | None = None

    def leave(self, source: torch.Tensor, *, after: Event) -> Timed:
        return self.tier.copy_out(self._block, source, after)

    def enter(self, target: torch.Tensor, *, after: Event) -> Timed:
        self._reload = self.tier.copy_in(target, self._block, after)
        return self._reload[1]

    def release(self) -> None:
        self.tier.give_back(self._segment, self._offset, self._block.numel(), self._number, self._step, self._reload)


class DiskTier(_Ledger):
    """Scratch file: ranges written and read by the store's own threads."""

    name = TierName.DISK
    lane_out = Lane.DISK_WRITE
    lane_in = Lane.DISK_READ

    def __init__(self, disk: Disk, budget: int | None) -> None:
        super().__init__(budget)
        self.disk = disk

    def expect(self, nbytes: int) -> None:
        return None  # its file is of the budget's size from the beginning, or grows

    def claim(self, nbytes: int) -> Place | None:
        extent = self.disk.reserve(nbytes)
        if extent is None:
            return None
        self.take(nbytes)
        return _DiskPlace(self, extent, nbytes)

    def end_step(self) -> None:
        return None

    def close(self) -> None:
        self.disk.close()


class _DiskPlace:
    __slots__ = ("_extent", "_nbytes", "tier")

    def __init__(self, tier: DiskTier, extent: Extent, nbytes: int) -> None:
        self.tier = tier
        self._extent = extent
        self._nbytes = nbytes

    def leave(self, source: torch.Tensor, *, after: Event) -> Timed:
        return self.tier.disk.write(self._extent, source, after=(after,))

    def enter(self, target: torch.Tensor, *, after: Event) -> Timed:
        return self.tier.disk.read(self._extent, target, after=(after,))

    def release(self) -> None:
        self.tier.disk.release(self._extent)
        self.tier.used -= self._nbytes
