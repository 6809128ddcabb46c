"""Where bytes can rest outside the device: the host arena and the disk, behind one interface.

A tier hands out places. A place is written once, may be read many times, and is given back once; who holds a place owns
its bytes. Budgets are hard (R8): `claim` answers None when a tier is full, and never takes more than it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memo.swap.freelist import FreeList
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
    """Host arena: exact-size segments, together never above the budget, divided by a first-fit free list.

    Segments are taken when they are first needed, since locking pages costs about 0.3 s per GiB and a small model should
    not pay for a large budget. A storage never spans two segments: a copy across two page-lock registrations fails.
    """

    name = TierName.HOST
    lane_out = Lane.D2H
    lane_in = Lane.H2D
    SEGMENT = 1 << 30

    def __init__(self, backend: Backend, budget: int) -> None:
        super().__init__(budget)
        self._backend = backend
        self._segments: list[tuple[torch.Tensor, FreeList]] = []
        self._reserved = 0

    def claim(self, nbytes: int) -> Place | None:
        for memory, free in self._segments:
            offset = free.allocate(nbytes)
            if offset is not None:
                return self._place(memory, free, offset, nbytes)
        return self._grow(nbytes)

    def _grow(self, nbytes: int) -> Place | None:
        assert self.budget is not None
        need = -(-nbytes // PAGE) * PAGE
        room = (self.budget - self._reserved) // PAGE * PAGE
        if need > room:
            return None
        size = min(room, max(need, self.SEGMENT))
        memory = self._backend.empty_host(size)
        free = FreeList(size, align=PAGE)
        self._segments.append((memory, free))
        self._reserved += size
        offset = free.allocate(nbytes)
        assert offset is not None
        return self._place(memory, free, offset, nbytes)

    def _place(self, memory: torch.Tensor, free: FreeList, offset: int, nbytes: int) -> Place:
        self.take(nbytes)
        return _HostPlace(self, free, offset, memory[offset : offset + nbytes])

    def copy_out(self, block: torch.Tensor, source: torch.Tensor, after: Event) -> Timed:
        self._backend.d2h.wait(after)
        return self._backend.d2h.copy(block, source)

    def copy_in(self, target: torch.Tensor, block: torch.Tensor, after: Event) -> Timed:
        self._backend.h2d.wait(after)
        return self._backend.h2d.copy(target, block)

    def close(self) -> None:
        self._segments.clear()
        self._reserved = 0


class _HostPlace:
    __slots__ = ("_block", "_free", "_offset", "tier")

    def __init__(self, tier: HostTier, free: FreeList, offset: int, block: torch.Tensor) -> None:
        self.tier = tier
        self._free = free
        self._offset = offset
        self._block = block

    def leave(self, source: torch.Tensor, *, after: Event) -> Timed:
        return self.tier.copy_out(self._block, source, after)

    def enter(self, target: torch.Tensor, *, after: Event) -> Timed:
        return self.tier.copy_in(target, self._block, after)

    def release(self) -> None:
        self._free.free(self._offset)
        self.tier.used -= self._block.numel()


class DiskTier(_Ledger):
    """Scratch file: ranges written and read by the store's own threads."""

    name = TierName.DISK
    lane_out = Lane.DISK_WRITE
    lane_in = Lane.DISK_READ

    def __init__(self, disk: Disk, budget: int | None) -> None:
        super().__init__(budget)
        self.disk = disk

    def claim(self, nbytes: int) -> Place | None:
        extent = self.disk.reserve(nbytes)
        if extent is None:
            return None
        self.take(nbytes)
        return _DiskPlace(self, extent, nbytes)

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
