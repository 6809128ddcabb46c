"""Canonical branch and bound in Python: a second opinion of mip/address/native/tree.h, which says why prunes are sound."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby

from memo.mip.address.greedy_fit import align, meeting
from memo.mip.address.instance import Instance
from memo.mip.address.native_search import Pure, SearchAnswer, SearchOutcome, _in_thread

NEVER = 1 << 62
IMPOSSIBLE, FOUND, STOPPED = 0, 1, 2

Low = tuple[int, int]


class TreeSearch:
    """Engine in Python, two orders of magnitude slower than the compiled one, and without the local search."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        fits = Pure(instance)
        self.sweep, self.fit, self.refill = fits.sweep, fits.fit, fits.refill

    def search(
        self, order: Sequence[int], *, capacity: int, node_limit: int, deadline: float, conflicts: array[int]
    ) -> SearchOutcome:
        """As `Engine.search`."""
        search = Tree(
            self._instance,
            order,
            capacity=capacity,
            node_limit=node_limit,
            expired=lambda: time.monotonic() > deadline,
            conflicts=conflicts,
        )
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 4 * self._instance.n + 1000))
        try:
            found = _in_thread(search.run, self._instance.n * 16, search.halt)
        finally:
            sys.setrecursionlimit(limit)
        offsets = tuple(search.offsets) if found == SearchAnswer.FOUND else ()
        return SearchOutcome(answer=SearchAnswer(found), offsets=offsets, nodes=search.nodes)


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
        self._sections = [range(*span) for span in instance.spans]
        self._meets = meeting(instance)
        self._rest = list(instance.loads)
        self._low_end = [0] * instance.n
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

    def _solve(self, part: list[int], low: Low) -> bool:
        """Places the buffers of a part, all after `low` = (offset, rank) of the last placed one."""
        if not part:
            return True
        self.nodes += 1
        if self._over():
            return False
        sizes, smallest = self._instance.sizes, min(self._instance.sizes[i] for i in part)
        waiting = {i for i in part if self._waits(i, low)}
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
            self._low_end[i] = align(top, self._instance.alignments[i])
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
        for index in sorted(part, key=lambda i: spans[i][0]):
            if spans[index][0] >= end:
                name += 1
            owner[index] = name
            end = max(end, spans[index][1])
        pieces = groupby(sorted(part, key=lambda i: (owner[i], self._rank[i])), key=owner.__getitem__)
        return sorted((list(piece) for _, piece in pieces), key=len)
