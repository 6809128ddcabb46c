"""Simulation of PyTorch's CUDA caching allocator on an allocation trace: segments and bytes taken from the driver.

Follows c10/cuda/CUDACachingAllocator.cpp (constants in c10/cuda/CUDACachingAllocator.h and c10/core/AllocatorConfig.h)
of torch 2.11 to 2.13, with default settings or `expandable_segments:True`. Names in comments are functions of that
file. Streams do not share blocks. Not modelled: `record_stream`, rounding to power-of-two divisions, garbage
collection, CUDA graphs, private pools.

    request ──round──▶ pool (small, large) ──best fit──▶ block ──split──▶ address
                                       └── none: a new segment, or the expandable segment's next pages
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Iterable

from memo.allocator.trace import AllocationTrace

MIN_BLOCK = 512
"""kMinBlockSize: requests are rounded up to multiples of it."""
SMALL_SIZE = 1 << 20
"""kSmallSize: largest request that the small pool serves."""
SMALL_BUFFER = 2 << 20
"""kSmallBuffer: segment size of the small pool."""
LARGE_BUFFER = 20 << 20
"""kLargeBuffer: segment size for large requests below MIN_LARGE_ALLOC."""
MIN_LARGE_ALLOC = 10 << 20
"""kMinLargeAlloc: larger requests get a segment of their own size."""
ROUND_LARGE = 2 << 20
"""kRoundLarge: such segments are rounded up to multiples of it."""

# Address space of an expandable segment, in whole pages. The real one is 9/8 of the device's memory for each pool.
_ENDLESS = LARGE_BUFFER << 36


def round_size(nbytes: int) -> int:
    """Returns the block size for a request (round_size)."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def unsplit_nbytes(request: int, others: Iterable[int]) -> int:
    """Returns the most bytes by which a block may be larger than the request that it serves.

    A rest that the small pool would serve stays with the block (should_split): of a block that served one of the `others`,
    or of a segment of its own.
    """
    size = round_size(request)
    if size <= SMALL_SIZE:
        return size - request
    segment = -(-size // ROUND_LARGE) * ROUND_LARGE if size >= MIN_LARGE_ALLOC else size
    rests = (other - size for other in (segment, *map(round_size, others)))
    return size - request + max((rest for rest in rests if 0 <= rest <= SMALL_SIZE), default=0)


class Segments(enum.StrEnum):
    """Kind of segments."""

    FIXED = "fixed"
    """One cudaMalloc each; the default."""
    EXPANDABLE = "expandable"
    """Address ranges that grow by pages: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CachingUse:
    """Memory use of a trace in the caching allocator."""

    segments: Segments
    reserved_nbytes: int
    """Bytes taken from the driver by the end, which is also the peak."""
    allocated_nbytes: int
    """Peak bytes in live blocks."""
    driver_calls: int
    """cudaMalloc calls, or mappings of new pages."""
    addresses: dict[str, int] = dataclasses.field(repr=False)
    """Address of each allocation, by id; segments do not overlap."""


def simulate_caching(trace: AllocationTrace, segments: Segments = Segments.FIXED) -> CachingUse:
    """Runs a trace through an empty caching allocator."""
    allocator = CachingAllocator(segments)
    blocks: dict[str, CachedBlock] = {}
    addresses: dict[str, int] = {}
    for allocation, is_free in trace.events():
        if is_free:
            allocator.free(blocks.pop(allocation.id))
        else:
            block = blocks[allocation.id] = allocator.malloc(allocation.size, stream=allocation.stream)
            addresses[allocation.id] = block.address
    return CachingUse(
        segments=segments,
        reserved_nbytes=allocator.reserved_nbytes,
        allocated_nbytes=allocator.peak_nbytes,
        driver_calls=allocator.driver_calls,
        addresses=addresses,
    )


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class CachedBlock:
    """Range of addresses in one segment, linked to its neighbours there."""

    address: int
    nbytes: int
    pool: _Pool
    allocated: bool = False
    mapped: bool = True
    """False for the part of an expandable segment that has no memory yet."""
    before: CachedBlock | None = None
    after: CachedBlock | None = None

    @property
    def end(self) -> int:
        """First address behind the block."""
        return self.address + self.nbytes


class _Pool:
    """Free blocks of one stream and one size class."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page = SMALL_BUFFER if small else LARGE_BUFFER
        self.unmapped: list[CachedBlock] = []
        """Parts of expandable segments without memory, by address."""
        self._free: list[tuple[int, int, CachedBlock]] = []  # by size, then by address (BlockComparatorSize)

    def add(self, block: CachedBlock) -> None:
        if block.mapped:
            bisect.insort(self._free, (block.nbytes, block.address, block), key=lambda entry: entry[:2])
        else:
            bisect.insort(self.unmapped, block, key=lambda each: each.address)

    def remove(self, block: CachedBlock) -> None:
        if block.mapped:
            del self._free[self._index(block.nbytes, block.address)]
        else:
            self.unmapped.remove(block)

    def take(self, nbytes: int, segments: Segments) -> CachedBlock | None:
        """Removes and returns the smallest free block that is large enough (get_free_block)."""
        index = self._index(nbytes, 0)
        if index == len(self._free):
            return None
        if segments is Segments.EXPANDABLE:
            # A block before unmapped pages counts with their size: taking it would end the segment's growth.
            while index + 1 < len(self._free) and _grown(self._free[index + 1][2]) < _grown(self._free[index][2]):
                index += 1
        return self._free.pop(index)[2]

    def expandable(self, nbytes: int) -> CachedBlock | None:
        """The first free or unmapped block from which on so many bytes are free or unmapped (find_expandable_block)."""
        for block in self.unmapped:
            before = block.before
            first = block if before is None or before.allocated else before
            found = 0
            last: CachedBlock | None = first
            while found < nbytes and last is not None and not last.allocated:
                found, last = found + last.nbytes, last.after
            if found >= nbytes:
                return first
        return None

    def release(self, segments: Segments) -> int:
        """Gives up what no allocation touches, segments or pages of expandable ones; returns its bytes."""
        released = 0
        for _, _, block in list(self._free):
            if segments is Segments.FIXED:
                if block.before is None and block.after is None:
                    self.remove(block)
                    released += block.nbytes
                continue
            first, end = -(-block.address // self.page) * self.page, block.end // self.page * self.page
            if first < end:
                released += end - first
                self._unmap(block, first, end)
        return released

    def _unmap(self, block: CachedBlock, first: int, end: int) -> None:
        """Takes the memory from addresses `first` to `end` of a free block (unmap_block)."""
        self.remove(block)
        if first > block.address:
            rest = _split(block, first - block.address)
            self.add(block)
            block = rest
        if end < block.end:
            self.add(_split(block, end - block.address))
        block.mapped = False
        _merge_neighbours(block)
        self.add(block)

    def _index(self, nbytes: int, address: int) -> int:
        return bisect.bisect_left(self._free, (nbytes, address), key=lambda entry: entry[:2])


def _grown(block: CachedBlock) -> int:
    after = block.after
    return block.nbytes + (after.nbytes if after is not None and not after.mapped else 0)


class CachingAllocator:
    """Caching allocator of one device.

    Args:
        segments: kind of segments.
        capacity: bytes that the driver has; None is without limit.
    """

    def __init__(self, segments: Segments = Segments.FIXED, capacity: int | None = None) -> None:
        self._segments = segments
        self._capacity = capacity
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0
        self.reserved_nbytes = 0
        self.allocated_nbytes = 0
        self.peak_nbytes = 0
        self.driver_calls = 0

    def malloc(self, nbytes: int, *, stream: int = 0) -> CachedBlock:
        """Allocates a block of at least `nbytes`; the caller frees it.

        Raises:
            MemoryError: the driver has no room, unused segments returned.
        """
        wanted = round_size(nbytes)
        small = wanted <= SMALL_SIZE
        pool = self._pools.setdefault((stream, small), _Pool(small=small))
        block = pool.take(wanted, self._segments)
        if block is None:
            try:
                block = self._new(pool, wanted)
            except MemoryError:  # once more, without what is unused (release_cached_blocks)
                self.reserved_nbytes -= sum(each.release(self._segments) for each in self._pools.values())
                block = self._new(pool, wanted)
        if self._should_split(block, wanted):
            pool.add(_split(block, wanted))
        block.allocated = True
        self.allocated_nbytes += block.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.allocated_nbytes)
        return block

    def free(self, block: CachedBlock) -> None:
        """Returns the block to its pool, merged with its free neighbours (free_block)."""
        block.allocated = False
        self.allocated_nbytes -= block.nbytes
        _merge_neighbours(block)
        block.pool.add(block)

    def _should_split(self, block: CachedBlock, wanted: int) -> bool:
        rest = block.nbytes - wanted
        if block.pool.small or self._segments is Segments.EXPANDABLE:
            return rest >= MIN_BLOCK
        return rest > SMALL_SIZE

    def _new(self, pool: _Pool, wanted: int) -> CachedBlock:
        """A block with memory from the driver (alloc_block)."""
        return self._grow(pool, wanted) if self._segments is Segments.EXPANDABLE else self._segment(pool, wanted)

    def _reserve(self, nbytes: int) -> None:
        """Takes so many bytes from the driver."""
        if self._capacity is not None and self.reserved_nbytes + nbytes > self._capacity:
            raise MemoryError
        self.reserved_nbytes += nbytes
        self.driver_calls += 1

    def _segment(self, pool: _Pool, wanted: int) -> CachedBlock:
        """Allocates a whole segment by cudaMalloc (get_allocation_size)."""
        if pool.small:
            nbytes = SMALL_BUFFER
        elif wanted < MIN_LARGE_ALLOC:
            nbytes = LARGE_BUFFER
        else:
            nbytes = -(-wanted // ROUND_LARGE) * ROUND_LARGE
        self._reserve(nbytes)
        block = CachedBlock(address=self._next_address, nbytes=nbytes, pool=pool)
        self._next_address += nbytes
        return block

    def _grow(self, pool: _Pool, wanted: int) -> CachedBlock:
        """Maps pages between and behind free blocks, which become one (try_allocate_expandable_block)."""
        block = pool.expandable(wanted)
        if block is None:
            block = CachedBlock(address=self._next_address, nbytes=_ENDLESS, pool=pool, mapped=False)
            self._next_address += _ENDLESS
            pool.add(block)
        if not block.mapped:
            block = self._map(block, min(block.nbytes, wanted))
        while block.nbytes < wanted:
            rest = block.after
            assert rest is not None  # by `expandable`: an unmapped one
            block = self._map(rest, min(rest.nbytes, wanted - block.nbytes))
        pool.remove(block)
        return block

    def _map(self, block: CachedBlock, nbytes: int) -> CachedBlock:
        """Gives memory to the first pages of an unmapped block (map_block); returns the free block with them."""
        pool = block.pool
        nbytes = -(-nbytes // pool.page) * pool.page
        self._reserve(nbytes)
        pool.remove(block)
        if nbytes < block.nbytes:
            pool.add(_split(block, nbytes))
        block.mapped = True
        _merge_neighbours(block)
        pool.add(block)
        return block


def _split(block: CachedBlock, nbytes: int) -> CachedBlock:
    """Shortens the block to its first `nbytes`; returns the rest."""
    rest = CachedBlock(
        address=block.address + nbytes,
        nbytes=block.nbytes - nbytes,
        pool=block.pool,
        mapped=block.mapped,
        before=block,
        after=block.after,
    )
    if rest.after is not None:
        rest.after.before = rest
    block.after = rest
    block.nbytes = nbytes
    return rest


def _merge_neighbours(block: CachedBlock) -> None:
    """Merges the free blocks on both sides into `block`; they leave their pool (try_merge_blocks)."""
    before, after = block.before, block.after
    if before is not None and not before.allocated and before.mapped == block.mapped:
        block.pool.remove(before)
        block.address, block.nbytes = before.address, block.nbytes + before.nbytes
        block.before = before.before
        if block.before is not None:
            block.before.after = block
    if after is not None and not after.allocated and after.mapped == block.mapped:
        block.pool.remove(after)
        block.nbytes += after.nbytes
        block.after = after.after
        if block.after is not None:
            block.after.before = block
