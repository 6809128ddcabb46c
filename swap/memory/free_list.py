"""First-fit allocator of offsets in one range of bytes: the scratch file, and the host slab until a plan exists.

It owns offsets, never memory. Holes are kept in address order and adjacent ones are merged, so there is one hole again when
every allocation is freed. First fit packs low addresses: the high end stays whole for large requests.
Invariant: holes and allocations tile [0, capacity) exactly, and no two holes touch.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class FreeList:
    """Offsets in [0, capacity), each a multiple of `align`. Not thread-safe.

    Args:
        capacity: bytes, rounded down to `align`.
        align: bytes.
    """

    def __init__(self, capacity: int, *, align: int) -> None:
        if align <= 0:
            raise ValueError(f"align must be positive, not {align}")
        if capacity < 0:
            raise ValueError(f"capacity must not be negative, is {capacity}")
        self.align = align
        self.used = 0
        self.peak = 0
        self.capacity = capacity - capacity % align
        self._starts = [0] if self.capacity else []
        self._sizes = [self.capacity] if self.capacity else []
        self._allocated: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """Allocates `nbytes`, rounded up to `align`, at the lowest offset where they fit; None if they fit nowhere."""
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        size = -(-nbytes // self.align) * self.align
        index = next((i for i, hole in enumerate(self._sizes) if hole >= size), None)
        if index is None:
            return None
        offset = self._starts[index]
        if self._sizes[index] == size:
            del self._starts[index], self._sizes[index]
        else:
            self._starts[index] += size
            self._sizes[index] -= size
        self._allocated[offset] = size
        self.used += size
        self.peak = max(self.peak, self.used)
        return offset

    def allocate_at(self, offset: int, nbytes: int) -> bool:
        """Allocates `nbytes`, rounded up to `align`, at `offset` if they are free; otherwise False and no change."""
        if nbytes <= 0 or offset % self.align:
            raise ValueError(f"cannot allocate {nbytes} bytes at {offset}")
        size = -(-nbytes // self.align) * self.align
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return False
        start, hole = self._starts[index], self._sizes[index]
        if offset + size > start + hole:
            return False
        del self._starts[index], self._sizes[index]
        if offset > start:
            self._insert_hole(start, offset - start)
        if start + hole > offset + size:
            self._insert_hole(offset + size, start + hole - offset - size)
        self._allocated[offset] = size
        self.used += size
        self.peak = max(self.peak, self.used)
        return True

    def free(self, offset: int) -> None:
        """Frees the allocation at `offset`.

        Raises:
            ValueError: nothing is allocated at `offset`; the list is unchanged.
        """
        size = self._allocated.pop(offset, None)
        if size is None:
            raise ValueError(f"offset {offset} is not allocated: freed twice, or never allocated")
        self.used -= size
        self._insert_hole(offset, size)

    def keep(self, offsets: Collection[int]) -> None:
        """Frees the allocations at other offsets; with none to keep, also one that an interruption has left half made."""
        if not offsets:
            self.clear()
        elif len(offsets) < len(self._allocated):
            for offset in [offset for offset in self._allocated if offset not in offsets]:
                self.free(offset)

    def clear(self) -> None:
        """Frees every allocation, also one that an interruption has left half made."""
        self._starts = [0] if self.capacity else []
        self._sizes = [self.capacity] if self.capacity else []
        self._allocated = {}
        self.used = 0

    def extend(self, nbytes: int) -> None:
        """Appends `nbytes`, rounded down to `align`, at the end of the range."""
        size = nbytes - nbytes % self.align
        if size <= 0:
            raise ValueError(f"cannot extend by {nbytes} bytes")
        start = self.capacity
        self.capacity += size
        self._insert_hole(start, size)

    def _insert_hole(self, start: int, size: int) -> None:
        starts, sizes = self._starts, self._sizes
        index = bisect_right(starts, start)
        if index < len(starts) and start + size == starts[index]:
            size += sizes[index]
            del starts[index], sizes[index]
        if index and starts[index - 1] + sizes[index - 1] == start:
            sizes[index - 1] += size
        else:
            starts.insert(index, start)
            sizes.insert(index, size)
