"""Interval algebra against sets of instants, which cannot be wrong."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from memo.trace.intervals import intersection, length, pack_rows, subtraction, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def instants(intervals: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in intervals for t in range(start, end)}


@given(INTERVALS)
def test_union_covers_the_same_instants_and_is_disjoint(intervals: list[tuple[int, int]]) -> None:
    merged = union(intervals)
    assert instants(merged) == instants(intervals)
    assert length(merged) == len(instants(intervals))
    assert all(one[1] < other[0] for one, other in itertools.pairwise(merged))


@given(INTERVALS, INTERVALS)
def test_intersection_and_subtraction_are_those_of_sets(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    a, b = union(left), union(right)
    assert instants(intersection(a, b)) == instants(left) & instants(right)
    assert instants(subtraction(a, b)) == instants(left) - instants(right)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=40))
def test_packed_rows_never_overlap_and_are_as_few_as_overlap_at_once(found: list[tuple[int, int]]) -> None:
    intervals = sorted((start, start + d) for start, d in found)
    rows = pack_rows(intervals)
    shown = [(start, max(end, start + 1)) for start, end in intervals]
    for row in set(rows):
        mine = [interval for interval, own in zip(shown, rows, strict=True) if own == row]
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(mine))
    deepest = max((sum(start <= t < end for start, end in shown) for t, _ in shown), default=0)
    assert len(set(rows)) == deepest
