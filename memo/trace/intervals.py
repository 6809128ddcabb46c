"""Arithmetic on half-open time intervals: union, intersection, difference, length, and rows without overlap.

Intervals are pairs of integers, so that each rule of the statistics is one line of set algebra. A list called
"disjoint" is sorted, its intervals do not touch each other, and none is empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the disjoint list that covers the same instants; empty and backward intervals cover none."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Returns the instants in both of two disjoint lists."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            shared.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def subtraction(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Returns the instants in the first of two disjoint lists and not in the second."""
    kept: list[Interval] = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > start:
                kept.append((start, right[k][0]))
            start = max(start, right[k][1])
            k += 1
        if start < end:
            kept.append((start, end))
    return kept


def length(disjoint: Iterable[Interval]) -> int:
    """Sums the nanoseconds covered by a disjoint list."""
    return sum(end - start for start, end in disjoint)


def pack_rows(intervals: Sequence[Interval]) -> list[int]:
    """Assigns rows such that no two intervals of one row overlap, with as few rows as possible.

    Each interval takes the lowest free row, so a lane without overlap stays in row 0. An empty interval counts as one
    nanosecond long.

    Args:
        intervals: sorted by start.

    Returns:
        The row of each interval.
    """
    rows: list[int] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, row)
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (max(end, start + 1), row))
        rows.append(row)
    return rows
