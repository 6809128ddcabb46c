"""Greedy fits in Python: the reference for those of the C++ in native/, and what is used where that cannot be compiled."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from memo.mip.address.instance import Instance


def fit(instance: Instance, order: Sequence[int], *, best: bool, expired: Callable[[], bool]) -> tuple[int, ...] | None:
    """Places the buffers one by one, each in the first or the tightest gap; None when time ran out."""
    sizes, alignments = instance.sizes, instance.alignments
    meets = meeting(instance)
    offsets = [-1] * instance.n
    for index in order:
        if expired():
            return None
        taken = sorted((offsets[k], offsets[k] + sizes[k]) for k in meets[index] if offsets[k] >= 0)
        at, gaps = 0, []
        for begin, end in taken:
            if begin - at >= sizes[index]:
                gaps.append((begin - at if best else 0, at))
            at = max(at, align(end, alignments[index]))
        offsets[index] = min(gaps)[1] if gaps else at
    return tuple(offsets)


def sweep(instance: Instance) -> tuple[int, ...]:
    """Places the buffers by first fit in the order of their first sections."""
    sizes, alignments, offsets = instance.sizes, instance.alignments, [0] * instance.n
    living: list[tuple[int, int, int]] = []  # (offset, end, last section), sorted
    for index in sorted(range(instance.n), key=lambda i: instance.spans[i][0]):
        first, last = instance.spans[index]
        living = [one for one in living if one[2] > first]
        at = 0
        for begin, end, _ in living:
            if begin - at >= sizes[index]:
                break
            at = max(at, align(end, alignments[index]))
        offsets[index] = at
        insort(living, (at, at + sizes[index], last))
    return tuple(offsets)


def align(offset: int, alignment: int) -> int:
    """The least multiple of the alignment that is no less than the offset."""
    return -(-offset // alignment) * alignment


def meeting(instance: Instance) -> list[set[int]]:
    """For each buffer the indices of the others that are live in one of its sections."""
    inside: list[set[int]] = [set() for _ in range(instance.n_sections)]
    for index, span in enumerate(instance.spans):
        for section in range(*span):
            inside[section].add(index)
    return [set().union(*(inside[s] for s in range(*span))) - {index} for index, span in enumerate(instance.spans)]
