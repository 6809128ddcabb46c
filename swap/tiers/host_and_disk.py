"""Host tier and disk tier: the budgeted memories that saved bytes move to.

They own the budget and the room; the backend owns the copy lanes, and the store its file. Budgets are hard (R8).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from memo.events import Lane, TierName as TierName
from memo.swap.memory.free_list import FreeList
from memo.swap.memory.page_aligned import PAGE_BYTES, whole_pages
from memo.swap.memory.planned_layout import StepRecorder
from memo.swap.tiers.tier import Extent, Tier

if TYPE_CHECKING:
    import torch

    from memo.swap.backends.protocol import Backend, Disk, Event, HostSlab, Timed
    from memo.swap.memory.host_pool import HostPool

PAGE = PAGE_BYTES
SURPLUS = 20
"""A slab keeps up to 1/20 more than steps need, and grows by 1/20 at least."""


@dataclasses.dataclass(slots=True)
class _Block:
    """Room of an extent in the slab."""

    memory: torch.Tensor
    offset: int
    number: int
    """Number of the extent within its step, by the recorder."""
    step: int
    reload: tuple[int, Timed] | None = None
    """Number and event of its latest reload."""


class HostTier(Tier):
    """Host arena: one slab that grows in place as it is needed, never above the budget.

    Pinning takes some tenths of a second to a second per GiB (memo.swap.memory.pinned): a small model should not pay
    for a large budget, and no memory is locked twice. So the slab is never replaced. The first step's extents are placed by
    first fit, and the slab grows with them; later steps follow an address plan of these. Where an activation plan
    announces the bytes of later steps (`expect`), the slab grows to that size at once, in the background. After a step's
    extents have been planned, the slab gives back the surplus, if it is more than a twentieth and no activation plan may
    need it later.

    Args:
        backend: gives the slab and the two copy lanes.
        budget: the most bytes, rounded down to whole pages.
        segment_bytes: the slab grows by multiples of this.
        pool: budget that this tier shares with those of other jobs, and closes; None: it is this tier's alone.
    """

    name = TierName.HOST
    lane_out = Lane.D2H
    lane_in = Lane.H2D

    def __init__(
        self, backend: Backend, budget: int, *, segment_bytes: int = 64 << 20, pool: HostPool | None = None
    ) -> None:
        super().__init__(budget)
        self._backend = backend
        self._pool = pool
        self._segment_bytes = segment_bytes
        self._capacity = budget // PAGE * PAGE
        self._space = FreeList(self._capacity, align=PAGE)
        self._slab: HostSlab | None = None
        self._recorder = StepRecorder()
        self._was_full = False  # an extent of this step found no room
        self._has_forecast = False  # an activation plan has announced the bytes of steps, and may announce others
        self._forgets_steps = False  # the next extent while nothing is held begins a new record
        self._reloads = 0
        self._freed: tuple[int, Event] | None = None  # the latest reload out of room that has been released since

    @property
    def reserved(self) -> int:
        """Bytes taken from the system, or being taken."""
        return 0 if self._slab is None else self._slab.nbytes

    @property
    def obtainable(self) -> int | None:
        """The budget, or what this tier has of a pool and what is free there."""
        if self._pool is None or self.budget is None:
            return self.budget
        return min(self.budget, self._pool.held + self._pool.free)

    @property
    def free(self) -> int | None:
        """Bytes of whole pages that are free, in one piece or not."""
        assert self.obtainable is not None
        return max(0, min(self._capacity, self.obtainable) - self._space.used)

    def expect(self, nbytes: int) -> None:
        """Grows the slab in the background; earlier steps no longer serve as the record for a layout."""
        self._forgets_steps |= bool(nbytes) or self._has_forecast
        if nbytes and self._capacity:
            self._has_forecast = True
            self._take(self._open(), min(whole_pages(nbytes), self._capacity))

    def reserve(self, nbytes: int) -> Extent | None:
        """Reserves a block of the slab; None when the budget is used up.

        Raises:
            SwapError: the system refuses the memory; nothing is reserved.
        """
        if self._forgets_steps and not self.used:
            self._recorder = StepRecorder()
            self._forgets_steps = False
        number, offset = self._recorder.find(self._space, nbytes)
        if offset is None:
            self._was_full = True
            return None
        try:
            slab = self._grow_to(offset + whole_pages(nbytes))
        except BaseException:
            self._space.free(offset)
            raise
        if slab is None:
            self._space.free(offset)
            self._was_full = True
            return None
        self._recorder.placed(number, offset)
        block = _Block(slab.memory[offset : offset + nbytes], offset, number, self._recorder.step)
        return self._count(Extent(self, nbytes, block))

    def _grow_to(self, end: int) -> HostSlab | None:
        """Grows the slab so that its first `end` bytes may be used, and returns it; None where the pool has too few.

        It grows by a twentieth at least: copies are divided at the borders that each growth adds.
        """
        slab = self._open()
        if end > slab.nbytes:
            most = max(end, slab.nbytes + slab.nbytes // SURPLUS)
            segments = min(-(-most // self._segment_bytes) * self._segment_bytes, self._capacity)
            if not (self._take(slab, segments) or self._take(slab, end)):
                return None
        try:
            slab.wait(end)
        except BaseException:
            self._give_back_to_pool(slab)
            raise
        return slab

    def _take(self, slab: HostSlab, nbytes: int) -> bool:
        """Grows the slab, first of all in the pool; False where the pool has too few, and nothing changes."""
        if nbytes > slab.nbytes:
            if self._pool is not None and not self._pool.resize(nbytes):
                return False
            slab.grow(nbytes)
        return True

    def _give_back_to_pool(self, slab: HostSlab) -> None:
        """Leaves to others what the slab does not have."""
        if self._pool is not None:
            self._pool.resize(slab.nbytes)

    def _open(self) -> HostSlab:
        if self._slab is None:
            self._slab = self._backend.host_slab(self._capacity)
            if self._pool is not None:
                self._slab.when_freed(self._pool.close)
        return self._slab

    def end_step(self) -> None:
        """Plans the next step's layout and gives back the surplus of the slab; nothing is held now."""
        self._space.keep({extent.room.offset for extent in self.forget_lost()})
        was_full, self._was_full = self._was_full, False
        if self._forgets_steps or not self._recorder.end_step(PAGE, self._capacity):
            return
        # Where the step did not fit, the whole budget is kept: other extents may use what the plan leaves.
        if not (was_full or self._has_forecast or self.used):
            self._shrink(self._recorder.nbytes)

    def _shrink(self, nbytes: int) -> None:
        slab = self._open()
        if slab.nbytes > nbytes + nbytes // SURPLUS:
            self._backend.synchronize()  # a copy that only the device has ordered may still use it
            slab.shrink(nbytes)
            self._give_back_to_pool(slab)

    def release(self, extent: Extent) -> None:
        """Frees the block."""
        block: _Block = extent.room
        if block.reload is not None and (self._freed is None or self._freed[0] < block.reload[0]):
            self._freed = block.reload
        if self._count_out(extent):  # else its room may be another's by now
            self._space.free(block.offset)
            self._recorder.release(block.number, block.step)

    def write(self, extent: Extent, source: torch.Tensor, *, after: Event) -> Timed:
        """Issues the copy of `source` into the block."""
        self._after_reloads()
        self._backend.d2h.wait(after)
        return self._backend.d2h.copy(extent.room.memory, source)

    def _after_reloads(self) -> None:
        """E7: orders later copies out after the latest reload from a released extent, and so after all reloads before it.

        With one compute stream E4, the program's order and E1 imply this; a second compute stream has not waited for E4.
        """
        if self._freed is not None:
            self._backend.d2h.wait(self._freed[1])
            self._freed = None

    def read(self, extent: Extent, target: torch.Tensor, *, after: Event) -> Timed:
        """Issues the reload of the block into `target`."""
        self._backend.h2d.wait(after)
        self._reloads += 1
        reloaded = self._backend.h2d.copy(target, extent.room.memory)
        extent.room.reload = self._reloads, reloaded
        return reloaded

    def close(self) -> None:
        """Waits for copies in flight and gives the slab back."""
        if self._slab is not None:
            self._backend.synchronize()  # a copy that only the device has ordered may still use it
            self._slab.close()
        elif self._pool is not None:
            self._pool.close()
        self._slab = None


class DiskTier(Tier):
    """Scratch file: extents written and read by the store's own threads.

    Args:
        disk: the store.
        budget: bytes; None: as much as the file system has.
    """

    name = TierName.DISK
    lane_out = Lane.DISK_WRITE
    lane_in = Lane.DISK_READ

    def __init__(self, disk: Disk[Any], budget: int | None) -> None:
        super().__init__(budget)
        self.disk = disk

    @property
    def refusal(self) -> str | None:
        """Why the file system gave no more, if it was that."""
        return self.disk.refusal

    def reserve(self, nbytes: int) -> Extent | None:
        """Reserves a range of the file; None when the budget is used up."""
        room = self.disk.reserve(nbytes)
        return None if room is None else self._count(Extent(self, nbytes, room))

    def write(self, extent: Extent, source: torch.Tensor, *, after: Event) -> Timed:
        """Issues the write of `source`."""
        return self.disk.write(extent.room, source, after=(after,))

    def read(self, extent: Extent, target: torch.Tensor, *, after: Event) -> Timed:
        """Issues the read into `target`."""
        return self.disk.read(extent.room, target, after=(after,))

    def release(self, extent: Extent) -> None:
        """Releases the range."""
        self.disk.release(extent.room)
        self._count_out(extent)

    def close(self) -> None:
        """Closes the store."""
        self.disk.close()
