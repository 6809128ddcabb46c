"""The caching allocator's simulation: worked by hand from its rules, and against what must always hold."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from memo.allocator import (
    Allocation,
    AllocationTrace,
    CachedBlock,
    CachingAllocator,
    Segments,
    simulate_caching,
    unsplit_nbytes,
)
from memo.allocator.caching_model import round_size

KIB, MIB = 1 << 10, 1 << 20


def reserved(requests: list[int], segments: Segments = Segments.FIXED) -> int:
    """Reserved bytes after `requests`: a size is allocated; -n frees the n-th allocation (from 1)."""
    allocator, blocks = CachingAllocator(segments), []
    for request in requests:
        if request > 0:
            blocks.append(allocator.malloc(request))
        else:
            allocator.free(blocks[-request - 1])
    return allocator.reserved_nbytes


@pytest.mark.parametrize(("nbytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_to_512_bytes(nbytes: int, rounded: int) -> None:
    assert round_size(nbytes) == rounded


@pytest.mark.parametrize(
    ("requests", "nbytes"),
    [
        ([1], 2 * MIB),  # the small pool takes 2 MiB
        ([MIB, MIB], 2 * MIB),  # which serve two of its largest requests
        ([MIB, MIB, 512], 4 * MIB),
        ([MIB, MIB - 512, 512], 2 * MIB),  # a rest of 512 bytes is split off a small block
        ([MIB + 1], 20 * MIB),  # the large pool takes 20 MiB for what is below 10 MiB
        ([8 * MIB, 8 * MIB], 20 * MIB),  # the rest of 12 MiB is split off, and then one of 4 MiB
        ([8 * MIB, 8 * MIB, 4 * MIB], 20 * MIB),
        ([8 * MIB, 8 * MIB, 4 * MIB, 2 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),  # made to measure from 10 MiB on
        ([10 * MIB + 1], 12 * MIB),  # in steps of 2 MiB
        ([10 * MIB, -1, 10 * MIB], 10 * MIB),
        ([30 * MIB, -1, 29 * MIB, 2 * MIB], 50 * MIB),  # a rest of 1 MiB is not split off a large block
        ([30 * MIB, -1, 28 * MIB, 2 * MIB], 30 * MIB),
        ([12 * MIB, 16 * MIB, -1, -2, 11 * MIB, 15 * MIB], 28 * MIB),  # best fit
        ([12 * MIB, 12 * MIB, -1, -2, 24 * MIB], 48 * MIB),  # segments do not merge: fragmentation
        ([8 * MIB, 8 * MIB, -1, -2, 18 * MIB], 20 * MIB),  # parts of one segment do
        ([MIB, -1, MIB + 1], 22 * MIB),  # the pools share nothing
    ],
)
def test_fixed_segments_by_hand(requests: list[int], nbytes: int) -> None:
    assert reserved(requests) == nbytes


@pytest.mark.parametrize(
    ("requests", "nbytes"),
    [
        ([1], 2 * MIB),  # pages of 2 MiB in the small pool, of 20 MiB in the large one
        ([8 * MIB, 8 * MIB], 20 * MIB),
        ([30 * MIB], 40 * MIB),
        ([30 * MIB, 10 * MIB], 40 * MIB),
        ([30 * MIB, 11 * MIB], 60 * MIB),  # grows behind the free end of 10 MiB
        ([12 * MIB, 12 * MIB, -1, -2, 24 * MIB], 40 * MIB),  # neighbours merge across what were two requests
        ([30 * MIB, 10 * MIB, -2, 25 * MIB], 60 * MIB),  # the free end of 10 MiB and 15 MiB of the next page
        ([19 * MIB, MIB + 512, -1, 19 * MIB], 40 * MIB),
        ([20 * MIB, 20 * MIB, -1, 20 * MIB - 512], 40 * MIB),  # a rest of 512 bytes is split off
    ],
)
def test_expandable_segments_by_hand(requests: list[int], nbytes: int) -> None:
    assert reserved(requests, Segments.EXPANDABLE) == nbytes


@pytest.mark.parametrize(("nbytes", "got"), [(29 * MIB, 30 * MIB), (29 * MIB - 512, 29 * MIB - 512)])
def test_a_large_block_is_split_only_for_more_than_a_mebibyte(nbytes: int, got: int) -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB))
    assert allocator.malloc(nbytes).nbytes == got


def test_a_block_before_unmapped_pages_is_taken_last() -> None:
    """20 MiB free inside, 10 MiB free at the growing end: the smaller one fits better but could still grow."""
    allocator = CachingAllocator(Segments.EXPANDABLE)
    inside = allocator.malloc(20 * MIB)
    allocator.malloc(30 * MIB)  # and 10 MiB are left at the end
    allocator.free(inside)
    assert allocator.malloc(9 * MIB).address == inside.address


def test_streams_have_blocks_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(8 * MIB, stream=0))
    allocator.malloc(8 * MIB, stream=1)
    assert allocator.reserved_nbytes == 40 * MIB


def random_trace(seed: int, count: int = 400) -> AllocationTrace:
    rng = random.Random(seed)
    sizes = [1, 700, 5 * KIB, 300 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 11 * MIB, 64 * MIB + 3]
    starts = rng.sample(range(4 * count), count)
    return AllocationTrace(
        allocations=tuple(
            Allocation(
                id=str(number),
                lower=start,
                upper=start + rng.choice([1, 5, 40, 400]),
                size=max(1, rng.choice(sizes) - rng.randrange(600)),
                stream=int(rng.random() < 0.1),
            )
            for number, start in enumerate(starts)
        )
    )


@pytest.mark.parametrize("segments", Segments)
@pytest.mark.parametrize("seed", range(8))
def test_live_blocks_never_overlap_and_fit_into_what_is_reserved(seed: int, segments: Segments) -> None:
    allocator = CachingAllocator(segments)
    live: dict[str, CachedBlock] = {}
    for allocation, is_free in random_trace(seed).events():
        if is_free:
            allocator.free(live.pop(allocation.id))
        else:
            block = allocator.malloc(allocation.size, stream=allocation.stream)
            assert block.nbytes >= round_size(allocation.size)
            assert block.address % 512 == 0
            live[allocation.id] = block
        ranges = sorted((block.address, block.end) for block in live.values())
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
        assert allocator.allocated_nbytes == sum(block.nbytes for block in live.values()) <= allocator.reserved_nbytes


@pytest.mark.parametrize("segments", Segments)
def test_freeing_everything_leaves_whole_segments(segments: Segments) -> None:
    """Coalescing loses nothing: afterwards the largest request that ever fitted fits again without growing."""
    allocator = CachingAllocator(segments)
    blocks = [allocator.malloc(size) for size in (3 * MIB, 7 * MIB, 9 * MIB, 2 * MIB, 15 * MIB)]
    before = allocator.reserved_nbytes
    for block in random.Random(0).sample(blocks, len(blocks)):
        allocator.free(block)
    assert allocator.allocated_nbytes == 0
    for size in (3 * MIB, 7 * MIB, 9 * MIB, 2 * MIB, 15 * MIB):
        allocator.malloc(size)
    assert allocator.reserved_nbytes == before


@pytest.mark.parametrize("seed", range(4))
def test_reserved_is_at_least_the_peak_and_rounding_twice_changes_nothing(seed: int) -> None:
    trace = random_trace(seed)
    rounded = AllocationTrace(
        allocations=tuple(dataclasses.replace(a, size=round_size(a.size)) for a in trace.allocations)
    )
    for segments in Segments:
        use = simulate_caching(trace, segments)
        assert use == simulate_caching(rounded, segments)
        assert rounded.peak_nbytes <= use.allocated_nbytes <= use.reserved_nbytes


@pytest.mark.parametrize("segments", Segments)
def test_addresses_are_those_of_blocks_that_do_not_meet(segments: Segments) -> None:
    draw = random.Random(3)
    spans = [(lower := draw.randrange(200), lower + draw.randrange(1, 60)) for _ in range(120)]
    # Events of their own, and sizes of both pools.
    allocations = tuple(
        Allocation(id=str(number), lower=lower * 1000 + number, upper=upper * 1000 + 500 + number, size=size)
        for number, ((lower, upper), size) in enumerate(
            zip(spans, (512 * draw.randrange(1, 9000) for _ in spans), strict=True)
        )
    )
    use = simulate_caching(AllocationTrace(allocations=allocations), segments)
    assert use.addresses.keys() == {allocation.id for allocation in allocations}
    for one, other in itertools.combinations(allocations, 2):
        if one.lower < other.upper and other.lower < one.upper:
            first, second = use.addresses[one.id], use.addresses[other.id]
            assert first + one.size <= second or second + other.size <= first


def test_what_stays_with_a_block_by_hand() -> None:
    mib = 1 << 20
    assert unsplit_nbytes(100, []) == 412
    assert unsplit_nbytes(3 * mib // 2, [2 * mib]) == mib // 2
    assert unsplit_nbytes(3 * mib // 2, [4 * mib]) == 0
    assert unsplit_nbytes(11 * mib, []) == mib  # of a segment of 12 MiB
    assert unsplit_nbytes(21 * mib // 2, []) == 0  # a rest of 1.5 MiB is split off
