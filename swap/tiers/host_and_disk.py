"""Tiers: room for bytes outside the device, the host arena and the disk, behind one interface.

A tier hands out places. A place is written once, may be read many times, and is given back once; who holds a place owns
its bytes. Budgets are hard (R8): `claim` answers None when a tier is full, and never takes more than it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memo.events import Lane, Tier as TierName
from memo.swap.memory.free_list import FreeList
from memo.swap.memory.page_aligned import PAGE_BYTES, whole_pages
from memo.swap.memory.planned_layout import StepRecorder

if TYPE_CHECKING:
    import torch

    from memo.swap.backends.protocol import Backend, Disk, Event, Extent, HostSlab, Timed

__all__ = ["DiskTier", "HostTier", "Place", "Tier"]

PAGE = PAGE_BYTES
SURPLUS = 20
"""A slab keeps up to 1/20 more than steps need, and grows by 1/20 at least."""


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
        """Announces the most bytes that steps from now on will hold, by plan; 0: unknown."""

    def end_step(self) -> None:
        """Ends a step, whose places have all been given back."""

    def close(self) -> None: ...


class _Ledger:
    """Counts the bytes that a tier holds, and their peak."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.used = 0
        self.peak = 0

    def take(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)


class HostTier(_Ledger):
    """Host arena: one slab that grows in place as it is needed, never above the budget.

    Page-locking takes some tenths of a second to a second per GiB (memo.swap.memory.pinned): a small model should not
    pay for a large budget, and nobody twice. So the slab is never replaced. The first step is divided by first fit,
    and the slab grows with it; later steps follow a plan of its claims. Where a plan of activations announces what
    steps need (`expect`), the slab grows to that size at once, in the background. When a step's claims have been
    planned, the slab gives back what they do not need, where that is more than a twentieth and no plan of activations
    may want it later.

    Errors of the system are raised as the backend raised them; the claim is then undone.
    """

    name = TierName.HOST
    lane_out = Lane.D2H
    lane_in = Lane.H2D

    def __init__(self, backend: Backend, budget: int, *, segment_bytes: int = 64 << 20) -> None:
        super().__init__(budget)
        self._backend = backend
        self._segment_bytes = segment_bytes
        self._capacity = budget // PAGE * PAGE
        self._space = FreeList(self._capacity, align=PAGE)
        self._slab: HostSlab | None = None
        self._recorder = StepRecorder()
        self._refused = False  # in this step, for want of room
        self._by_plan = False  # somebody has said what steps need, and may say something else later
        self._begins_anew = False  # what is known of steps before is of no use to the next one
        self._reloads = 0
        self._left: tuple[int, Event] | None = None  # the latest reload out of room that has been given back since

    @property
    def reserved(self) -> int:
        """Bytes taken of the system, or on their way."""
        return 0 if self._slab is None else self._slab.nbytes

    def expect(self, nbytes: int) -> None:
        self._begins_anew |= bool(nbytes) or self._by_plan
        if nbytes and self._capacity:
            self._by_plan = True
            self._opened().grow(min(whole_pages(nbytes), self._capacity))

    def claim(self, nbytes: int) -> Place | None:
        if self._begins_anew and not self.used:
            self._recorder = StepRecorder()
            self._begins_anew = False
        number, planned = self._recorder.claim(nbytes)
        offset = self._offset(nbytes, planned)
        if offset is None:
            self._refused = True
            return None
        try:
            slab = self._reach(offset + whole_pages(nbytes))
        except BaseException:
            self._space.free(offset)
            raise
        self.take(nbytes)
        return _HostPlace(self, slab.memory[offset : offset + nbytes], offset, number)

    def _offset(self, nbytes: int, planned: int | None) -> int | None:
        if planned is not None:
            if self._space.allocate_at(planned, nbytes):
                return planned
            self._recorder.missed()
        return self._space.allocate(nbytes)

    def _reach(self, end: int) -> HostSlab:
        """The slab, grown so that its first `end` bytes may be used.

        It grows by a twentieth at least: each growth adds a border that copies are divided at.
        """
        slab = self._opened()
        if end > slab.nbytes:
            most = max(end, slab.nbytes + slab.nbytes // SURPLUS)
            slab.grow(min(-(-most // self._segment_bytes) * self._segment_bytes, self._capacity))
        slab.wait(end)
        return slab

    def _opened(self) -> HostSlab:
        if self._slab is None:
            self._slab = self._backend.host_slab(self._capacity)
        return self._slab

    def end_step(self) -> None:
        """Plans the next step's layout, and gives back what that does not need; nothing is held now."""
        refused, self._refused = self._refused, False
        if self._begins_anew or not self._recorder.end_step(PAGE, self._capacity):
            return
        # Where the step did not fit, the whole budget is worth having: what the plan leaves may take other claims.
        if not (refused or self._by_plan or self.used):
            self._shrink(self._recorder.nbytes)

    def _shrink(self, nbytes: int) -> None:
        slab = self._opened()
        if slab.nbytes > nbytes + nbytes // SURPLUS:
            self._backend.synchronize()  # a copy that only the device has ordered may still use it
            slab.shrink(nbytes)

    def give_back(self, offset: int, nbytes: int, number: int, step: int, reload: tuple[int, Event] | None) -> None:
        self._space.free(offset)
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
        """E7: orders copies out after the latest reload from room that is free again; reloads before it are done by then.

        With one compute stream E4, the program's order and E1 imply this; a second compute stream has not waited for E4.
        """
        if self._left is not None:
            self._backend.d2h.wait(self._left[1])
            self._left = None

    def copy_in(self, target: torch.Tensor, block: torch.Tensor, after: Event) -> tuple[int, Timed]:
        """Issues a reload; returns its number and its event."""
        self._backend.h2d.wait(after)
        self._reloads += 1
        return self._reloads, self._backend.h2d.copy(target, block)

    def close(self) -> None:
        if self._slab is not None:
            self._backend.synchronize()  # a copy that only the device has ordered may still use it
            self._slab.close()
        self._slab = None


class _HostPlace:
    """A block of the slab."""

    __slots__ = ("_block", "_number", "_offset", "_reload", "_step", "tier")

    def __init__(self, tier: HostTier, block: torch.Tensor, offset: int, number: int) -> None:
        self.tier = tier
        self._block = block
        self._offset = offset
        self._number = number
        self._step = tier.step
        self._reload: tuple[int, Timed] | None = None

    def leave(self, source: torch.Tensor, *, after: Event) -> Timed:
        return self.tier.copy_out(self._block, source, after)

    def enter(self, target: torch.Tensor, *, after: Event) -> Timed:
        self._reload = self.tier.copy_in(target, self._block, after)
        return self._reload[1]

    def release(self) -> None:
        self.tier.give_back(self._offset, self._block.numel(), self._number, self._step, self._reload)


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
    """An extent of the scratch file."""

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
