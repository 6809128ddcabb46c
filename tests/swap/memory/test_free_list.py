"""The free list against an oracle that keeps every byte."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings, strategies as st

from memo.swap.memory.free_list import FreeList


class ByteMap:
    """The stupid checker: one flag per unit, first fit by scanning."""

    def __init__(self, units: int) -> None:
        self.taken = [False] * units

    def allocate(self, units: int) -> int | None:
        for start in range(len(self.taken) - units + 1):
            if not any(self.taken[start : start + units]):
                self.taken[start : start + units] = [True] * units
                return start
        return None

    def free(self, start: int, units: int) -> None:
        assert all(self.taken[start : start + units])
        self.taken[start : start + units] = [False] * units

    def largest(self) -> int:
        best = run = 0
        for taken in self.taken:
            run = 0 if taken else run + 1
            best = max(best, run)
        return best


@settings(max_examples=200, deadline=None)
@given(
    units=st.integers(0, 40),
    ops=st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), st.integers(1, 70)),
            st.tuples(st.just("free"), st.integers(0, 99)),
            st.tuples(st.just("extend"), st.integers(8, 80)),
        ),
        max_size=60,
    ),
)
def test_every_answer_is_that_of_a_byte_map(units: int, ops: list[tuple[str, int]]) -> None:
    align = 8
    free, oracle = FreeList(units * align + 5, align=align), ByteMap(units)
    live: list[tuple[int, int]] = []
    peak = 0
    for op, number in ops:
        if op == "allocate":
            size = -(-number // align)
            offset, expected = free.allocate(number), oracle.allocate(size)
            assert offset == (None if expected is None else expected * align)
            if offset is not None:
                live.append((offset, size))
        elif op == "free" and live:
            offset, size = live.pop(number % len(live))
            free.free(offset)
            oracle.free(offset // align, size)
        elif op == "extend":
            free.extend(number)
            oracle.taken += [False] * (number // align)
        peak = max(peak, sum(oracle.taken))
        assert free.used == sum(oracle.taken) * align
        largest = oracle.largest() * align
        assert largest == 0 or copy.deepcopy(free).allocate(largest) is not None
        assert copy.deepcopy(free).allocate(largest + 1) is None
        assert free.capacity == len(oracle.taken) * align
    assert free.peak == peak * align


def test_the_lowest_hole_that_fits_is_taken() -> None:
    free = FreeList(1000, align=10)
    offsets = [free.allocate(100) for _ in range(10)]
    for offset in (offsets[2], offsets[6], offsets[7]):
        assert offset is not None
        free.free(offset)
    assert free.allocate(150) == 600
    assert free.allocate(100) == 200


def test_a_double_free_is_refused_and_changes_nothing() -> None:
    free = FreeList(4096, align=512)
    offset = free.allocate(1)
    assert offset == 0
    free.free(offset)
    with pytest.raises(ValueError, match="not allocated"):
        free.free(offset)
    assert (free.used, free.allocate(4096)) == (0, 0)


def test_an_offset_inside_an_allocation_is_no_allocation() -> None:
    free = FreeList(4096, align=512)
    free.allocate(2048)
    with pytest.raises(ValueError, match="512"):
        free.free(512)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_and_less_cannot_be_allocated(nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(nbytes)):
        FreeList(4096, align=512).allocate(nbytes)


def test_a_range_smaller_than_the_alignment_holds_nothing() -> None:
    free = FreeList(511, align=512)
    assert (free.capacity, free.allocate(1)) == (0, None)
