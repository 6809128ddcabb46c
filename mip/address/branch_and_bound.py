"""Canonical branch and bound, and greedy fits, in Python: the reference for the C++ in native/, and its fallback.

Any placement can be pushed down until every buffer rests on the ground, on another, or on a fixed one, and its buffers
can be listed in ascending order of (offset, rank). So it is enough to build placements in that order, each buffer at
the lowest place above all it overlaps in time: a canonical placement. The tree has no other nodes. Pruning:

Order        A buffer that could have come before the last placed one but did not must wait until something below it
             lifts it; with it in its place the branch was, or will be, explored elsewhere.
Dominance    A buffer is not a choice while another one fits entirely below it: in any solution that takes it first, the
             other can be moved down there, which is another branch.
Sections     In each section the unplaced buffers must fit above the lowest offset that any of them can have there.
Parts        Where no unplaced buffer crosses an instant, both sides of it are solved separately.
Memory       A state (waiting flags and offsets of the unplaced buffers) that failed once fails again. States are
             identified by a 64-bit hash.

A fixed buffer is a choice like others, at its own offset; buffers that would run into one rest on top of it.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import groupby

from memo.mip.address.instance import Instance

NEVER = 1 << 62
IMPOSSIBLE, FOUND, STOPPED = 0, 1, 2

Low = tuple[int, int]


class Tree:
    """One search of one instance for a placement within a capacity.

    Args: as `memo.mip.address.native_search.Engine.search`; `expired` says whether the deadline has passed.
    """

    def __init__(
        self,
        instance: Instance,
        order: Sequence[int],
        *,
        capacity: int,
        node_limit: int,
        expired: Callable[[], bool],
        conflicts: array[int],
    ) -> None:
        self.nodes = 0
        self.offsets = [0] * instance.n
        self._instance, self._capacity, self._node_limit = instance, capacity, node_limit
        self._expired, self._conflicts = expired, conflicts
        self._order = list(order)
        self._rank = {index: rank for rank, index in enumerate(order)}
        self._sections = [[s for span in spans for s in range(*span)] for spans in instance.spans]
        self._meets = _meeting(instance)
        self._obstacles = [self._obstacles_of(index) for index in range(instance.n)]
        self._rest = list(instance.loads)
        self._low_end = [self._settle(index, 0) for index in range(instance.n)]
        self._failed: set[int] = set()
        self._stopped = False

    def halt(self) -> None:
        """Makes a running search return STOPPED."""
        self._stopped = True

    def run(self) -> int:
        """Searches; returns FOUND, with `offsets` set, IMPOSSIBLE or STOPPED."""
        tops = map(sum, zip(self._low_end, self._instance.sizes, strict=True))
        if any(top > self._capacity for top in tops):
            return IMPOSSIBLE
        if self._solve(self._order, (0, -1)):
            return FOUND
        return STOPPED if self._stopped else IMPOSSIBLE

    def _over(self) -> bool:
        self._stopped = self._stopped or self.nodes > self._node_limit or self._expired()
        return self._stopped

    def _obstacles_of(self, index: int) -> list[int]:
        fixed = self._instance.fixed
        if fixed[index] >= 0:
            return []
        return sorted((k for k in self._meets[index] if fixed[k] >= 0), key=lambda k: (fixed[k], self._rank[k]))

    def _settle(self, index: int, at: int) -> int:
        """Lowest place at or above `at` that hits no fixed buffer; NEVER if the buffer is fixed below `at`."""
        instance = self._instance
        if instance.fixed[index] >= 0:
            return instance.fixed[index] if at <= instance.fixed[index] else NEVER
        at = _align(at, instance.alignments[index])
        for k in self._obstacles[index]:
            top = instance.fixed[k] + instance.sizes[k]
            if at < top and at + instance.sizes[index] > instance.fixed[k]:
                at = _align(top, instance.alignments[index])
        return at

    def _solve(self, part: list[int], low: Low) -> bool:
        """Places the buffers of a part, all after `low` = (offset, rank) of the last placed one."""
        if not part:
            return True
        self.nodes += 1
        if self._over():
            return False
        sizes, smallest = self._instance.sizes, min(self._instance.sizes[i] for i in part)
        waiting = {i for i in part if self._waits(i, low)}
        if any(self._instance.fixed[i] >= 0 for i in waiting):
            return False
        state = hash((tuple((i, -1 if i in waiting else self._low_end[i]) for i in part), bool(waiting) and low[0]))
        if state in self._failed:
            return False
        ceiling = min((low[0] + smallest if i in waiting else self._low_end[i]) + sizes[i] for i in part)
        choices = sorted(
            (self._low_end[i], self._rank[i], i) for i in part if i not in waiting and self._low_end[i] < ceiling
        )
        for at, rank, index in choices:
            if not self._room(part, (at, rank), smallest):
                break
            if self._place(part, at, index):
                return True
            if self._over():
                return False
        self._failed.add(state)
        return False

    def _waits(self, index: int, low: Low) -> bool:
        return (self._low_end[index], self._rank[index]) < low

    def _room(self, part: list[int], low: Low, smallest: int) -> bool:
        """Whether in every section the rest of the part fits above the lowest offset that any of it can have."""
        floor: dict[int, int] = {}
        for index in part:
            least = low[0] + smallest if self._waits(index, low) else self._low_end[index]
            for section in self._sections[index]:
                if least < floor.get(section, NEVER):
                    floor[section] = least
        tight = [s for s, least in floor.items() if least + self._rest[s] > self._capacity]
        for section in tight:
            self._conflicts[section] += 1
        return not tight

    def _place(self, part: list[int], at: int, index: int) -> bool:
        """Places one buffer and solves the rest; undone unless that succeeds."""
        sizes = self._instance.sizes
        if any(at + self._rest[s] > self._capacity for s in self._sections[index]):
            return False
        remaining = [i for i in part if i != index]
        top = at + sizes[index]
        lifted = [(i, self._low_end[i]) for i in remaining if i in self._meets[index] and self._low_end[i] < top]
        for i, _ in lifted:
            self._low_end[i] = self._settle(i, top)
        ok = all(self._low_end[i] + sizes[i] <= self._capacity for i, _ in lifted)
        if ok:
            for section in self._sections[index]:
                self._rest[section] -= sizes[index]
            low = (at, self._rank[index])
            ok = all(self._solve(smaller, low) for smaller in self._parts(remaining))
            for section in self._sections[index]:
                self._rest[section] += sizes[index]
        for i, was in lifted:
            self._low_end[i] = was
        if ok:
            self.offsets[index] = at
        return ok

    def _parts(self, part: list[int]) -> list[list[int]]:
        """Divides the part at instants that no buffer crosses; smallest piece first, each in branching order."""
        spans = self._instance.spans
        owner: dict[int, int] = {}
        end = name = -1
        for index in sorted(part, key=lambda i: spans[i][0][0]):
            if spans[index][0][0] >= end:
                name += 1
            owner[index] = name
            end = max(end, spans[index][-1][1])
        pieces = groupby(sorted(part, key=lambda i: (owner[i], self._rank[i])), key=owner.__getitem__)
        return sorted((list(piece) for _, piece in pieces), key=len)


def fit(instance: Instance, order: Sequence[int], *, best: bool, expired: Callable[[], bool]) -> tuple[int, ...] | None:
    """Places the buffers one by one, each in the first or the tightest gap; None when time ran out."""
    sizes, alignments = instance.sizes, instance.alignments
    meets = _meeting(instance)
    offsets = list(instance.fixed)
    for index in order:
        if expired():
            return None
        if instance.fixed[index] >= 0:
            continue
        taken = sorted((offsets[k], offsets[k] + sizes[k]) for k in meets[index] if offsets[k] >= 0)
        at, gaps = 0, []
        for begin, end in taken:
            if begin - at >= sizes[index]:
                gaps.append((begin - at if best else 0, at))
            at = max(at, _align(end, alignments[index]))
        offsets[index] = min(gaps)[1] if gaps else at
    return tuple(offsets)


def sweep(instance: Instance) -> tuple[int, ...]:
    """Places the buffers by first fit in the order of their first sections, above the fixed ones."""
    sizes, alignments, offsets = instance.sizes, instance.alignments, list(instance.fixed)
    ground = max((at + size for at, size in zip(offsets, sizes, strict=True) if at >= 0), default=0)
    living: list[tuple[int, int, int]] = []  # (offset, end, last section), sorted
    for index in sorted(range(instance.n), key=lambda i: instance.spans[i][0][0]):
        if offsets[index] >= 0:
            continue
        spans = instance.spans[index]
        living = [one for one in living if one[2] > spans[0][0]]
        at = _align(ground, alignments[index])
        for begin, end, _ in living:
            if begin - at >= sizes[index]:
                break
            at = max(at, _align(end, alignments[index]))
        offsets[index] = at
        insort(living, (at, at + sizes[index], spans[-1][1]))
    return tuple(offsets)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _meeting(instance: Instance) -> list[set[int]]:
    """For each buffer the indices of the others that are live in one of its sections."""
    inside: list[set[int]] = [set() for _ in range(instance.n_sections)]
    for index, spans in enumerate(instance.spans):
        for span in spans:
            for section in range(*span):
                inside[section].add(index)
    return [
        set().union(*(inside[s] for span in spans for s in range(*span))) - {index}
        for index, spans in enumerate(instance.spans)
    ]
