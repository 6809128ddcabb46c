"""Solver of one arena: greedy fits, then local and tree searches in turn, until the bound is met or time is up.

Owns the incumbent and the lower bound. Invariant: `lower` is proven, and `offsets` fit in `upper` units; the two only
approach each other. Work is limited by steps and nodes, not by seconds, so that two runs which both end before the time
limit give the same plan on machines of any speed.

    greedy fits ─▶ upper ─┬▶ core: the buffers of the highest loads alone, the others refilled around them
                          ├▶ refill: local search from the incumbent to a height below it
                          └▶ tree search at a capacity in [lower, upper) ─▶ found: upper = its height
                                                                         └▶ impossible: lower = that capacity + 1
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence

from memo.mip.address.buffer_orders import portfolio_orders, search_orders
from memo.mip.address.instance import Instance
from memo.mip.address.native_search import Pure, SearchAnswer, SearchEngine, Weights, make_engine

FIT_MEETINGS = 500_000_000
"""Pairs of buffers that the greedy fits may look at together: about two seconds, all orders up to some 20,000 buffers."""
NODE_LIMIT = 4000
"""Nodes of the shortest searches: some order solves each of MiniMalloc's instances A to F within about this many."""
FIRST_NODE_LIMIT = 20_000
"""Nodes of the searches by named orders, which succeed at once more often than others."""
NAMED_ORDERS = 3
CYCLE, NEAR = 4, 0.02
"""Targets of tree searches without a capacity: of every CYCLE, all but one are the lower bound when the incumbent is within
the fraction NEAR of it, else one is; the others lie between the bound and the incumbent."""
TREE_MEETINGS = 5_000_000
"""Pairs of buffers in the largest instances for tree search: beyond, one descent takes seconds."""
CORE_LOADS, CORE_MOST = (0.9, 0.97, 0.99), 0.5
"""The core: buffers that live where the load is more than a fraction of the largest; the first fraction for which they are
no more than CORE_MOST of all. A core has a core of its own."""
CORE_TURNS = 4
REFILL_STEPS = 5000
"""Steps of the shortest refills."""
REFILLS = (
    (0.66, Weights(by_size=0.5, by_width=0.5)),
    (0.9, Weights(by_size=0.0, by_width=0.2)),
    (0.0, Weights(by_size=0.5, by_width=0.5)),
    (0.66, Weights(by_size=0.0, by_width=0.2)),
)
"""Refills in turn: the part of the gap that is left at their target, and their weights. Which weights succeed differs from
instance to instance: sizes matter where they are few and large, widths nearly everywhere."""


class ArenaSolver:
    """Incumbent and lower bound of one instance, and the methods that close the gap between them.

    Args:
        instance: the arena's buffers.
        capacity: a size in units that is good enough; None asks for the smallest.
        seed: of the searches.
        report: called after each change of incumbent or bound.
        engine: the inner loops; compiled where possible by default.
        core_loads: loads that make the core, and its cores, as fractions of the largest.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        capacity: int | None = None,
        seed: int = 0,
        report: Callable[[ArenaSolver], None] | None = None,
        engine: SearchEngine | None = None,
        core_loads: Sequence[float] = CORE_LOADS,
    ) -> None:
        self.instance = instance
        self.lower = instance.lower_bound
        self.upper: int | None = None
        self.offsets: tuple[int, ...] = ()
        self.method = ""
        self.nodes = 0
        self._capacity, self._seed, self._core_loads = capacity, seed, core_loads
        self._report = report or (lambda _: None)
        self._halvings = 1
        self._engine = engine or make_engine(instance)

    @property
    def optimal(self) -> bool:
        """Whether no smaller arena exists."""
        return self.upper is not None and self.upper <= self.lower

    @property
    def impossible(self) -> bool:
        """Whether no arena within the capacity exists."""
        return self._capacity is not None and self.lower > self._capacity

    @property
    def fits(self) -> bool:
        """Whether there is an incumbent within the capacity."""
        return self.upper is not None and (self._capacity is None or self.upper <= self._capacity)

    def offer(self, offsets: tuple[int, ...], method: str) -> None:
        """Makes the placement the incumbent if it is the smallest so far."""
        height = self.instance.height(offsets)
        if self.upper is None or height < self.upper:
            self.upper, self.offsets, self.method = height, offsets, method
        self._report(self)

    def run(self, *, deadline: float, gap: float = 0.0) -> None:
        """Runs portfolio and searches until `done`."""
        self.portfolio(deadline=deadline, gap=gap)
        self.search(deadline=deadline, gap=gap)

    def done(self, *, deadline: float, gap: float = 0.0) -> bool:
        """Whether the incumbent is within `gap`, the capacity is met or refuted, or the deadline has passed.

        Args:
            deadline: in seconds of `time.monotonic`.
            gap: accepted excess over the lower bound, as a fraction of it.
        """
        enough = self.upper is not None and self.upper <= self.lower * (1 + gap)
        met = self._capacity is not None and (self.fits or self.impossible)
        return self.optimal or enough or met or time.monotonic() >= deadline

    def portfolio(self, *, deadline: float, gap: float = 0.0) -> None:
        """Runs greedy fit in the portfolio's orders until `done`; a sweep over time where none of them ends in time."""
        if self.impossible or self.optimal:
            return
        most = max(1, FIT_MEETINGS // max(1, self.instance.n_meetings))
        fits = ((name, order, best) for name, order in portfolio_orders(self.instance) for best in (False, True))
        for name, order, best in itertools.islice(fits, most):
            offsets = self._engine.fit(order, best=best, deadline=deadline)
            if offsets is None:
                break
            self.offer(offsets, f"{'best' if best else 'first'} fit by {name}")
            if self.done(deadline=deadline, gap=gap):
                return
        if not self.offsets:
            self.offer(self._engine.sweep(), "first fit by start")

    def follow(self, order: Sequence[int], method: str, *, deadline: float) -> None:
        """Runs greedy fit in the order of a known placement, from the lowest buffer up.

        The result is never worse than that placement: no buffer gets a higher offset than it had there.
        """
        offsets = self._engine.fit(list(order), best=False, deadline=deadline)
        if offsets is not None:
            self.offer(offsets, method)

    def search(self, *, deadline: float, gap: float = 0.0, turns: int | None = None) -> None:
        """Runs local and tree searches in turn until `done`.

        Args:
            deadline: in seconds of `time.monotonic`.
            gap: as for `done`.
            turns: most searches of each kind.
        """
        if isinstance(self._engine, Pure) or self.done(deadline=deadline, gap=gap):
            return
        self._core(deadline=deadline, gap=gap)
        conflicts = array("q", bytes(8 * self.instance.n_sections))
        trees = self.instance.n_meetings <= TREE_MEETINGS
        orders = search_orders(self.instance, seed=self._seed, conflicts=conflicts) if trees else itertools.repeat([])
        for turn, order in enumerate(itertools.islice(orders, turns)):
            if not self.done(deadline=deadline, gap=gap):
                self._local(turn, deadline=deadline)
            if trees and not self.done(deadline=deadline, gap=gap):
                self._tree(turn, order, conflicts, deadline=deadline)
            if self.done(deadline=deadline, gap=gap):
                return

    def _core(self, *, deadline: float, gap: float) -> None:
        """Places the buffers of the highest loads alone, and the others around them."""
        instance = self.instance
        loads = self._core_loads
        while loads:
            share, *loads = loads
            load = share * max(instance.loads)
            core = [index for index, peak in enumerate(instance.peaks) if peak > load]
            if len(core) <= CORE_MOST * instance.n:
                break
        else:
            return
        inner = ArenaSolver(instance.part(core), capacity=self._capacity, seed=self._seed, core_loads=loads)
        inner.portfolio(deadline=deadline, gap=gap)
        inner.search(deadline=deadline, gap=gap, turns=CORE_TURNS)
        start = [-1] * instance.n
        for index, offset in zip(core, inner.offsets, strict=True):
            start[index] = offset
        self._refill(start, max(self._below(0.0), inner.upper or 0), REFILLS[0][1], "core first", deadline=deadline)

    def _local(self, turn: int, *, deadline: float) -> None:
        """Refills the incumbent below a smaller height."""
        share, weights = REFILLS[turn % len(REFILLS)]
        steps = REFILL_STEPS * luby(turn // len(REFILLS) + 1)
        self._refill(
            self.offsets, self._below(share), weights, "local search", steps=steps, turn=turn, deadline=deadline
        )

    def _refill(
        self,
        start: Sequence[int],
        target: int,
        weights: Weights,
        method: str,
        *,
        steps: int = REFILL_STEPS,
        turn: int = 0,
        deadline: float,
    ) -> None:
        if self.upper is None or target >= self.upper:
            return
        seed = self._seed * 1_000_003 + turn & 0xFFFFFFFF
        offsets = self._engine.refill(start, target=target, steps=steps, seed=seed, weights=weights, deadline=deadline)
        if offsets is not None:
            self.offer(offsets, method)

    def _below(self, share: float) -> int:
        """A height below the incumbent's: the user's, or one that leaves this part of the gap."""
        if self._capacity is not None or self.upper is None:
            return self._capacity or 0
        return min(self.upper - 1, self.lower + int((self.upper - self.lower) * share))

    def _tree(self, turn: int, order: Sequence[int], conflicts: array[int], *, deadline: float) -> None:
        """Runs one tree search."""
        shortest = max(NODE_LIMIT, self.instance.n * 3 // 2)
        named = turn < NAMED_ORDERS
        target = self._target(turn)
        outcome = self._engine.search(
            order,
            capacity=target,
            node_limit=max(FIRST_NODE_LIMIT, shortest) if named else shortest * luby(turn - NAMED_ORDERS + 1),
            deadline=deadline,
            conflicts=conflicts,
        )
        self.nodes += outcome.nodes
        if outcome.answer is SearchAnswer.FOUND:
            self.offer(outcome.offsets, "tree search")
            self._halvings = 1
        elif outcome.answer is SearchAnswer.IMPOSSIBLE:
            self.lower = max(self.lower, target + 1)
            self._report(self)
        elif target > self.lower:
            self._halvings += 1

    def _target(self, turn: int) -> int:
        """Capacity of the next tree search: the user's, the lower bound, or at times a point nearer to the incumbent."""
        if self._capacity is not None:
            return self._capacity
        if self.upper is None or turn < NAMED_ORDERS:
            return self.lower
        near = self.upper <= self.lower * (1 + NEAR)
        if turn % CYCLE < (CYCLE - 1 if near else 1):
            return self.lower
        step = (self.upper - self.lower) >> self._halvings
        return max(self.lower, self.upper - max(1, step))


def luby(turn: int) -> int:
    """Luby's restart sequence: 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ... for turn 1, 2, ..."""
    while turn & (turn + 1):
        turn -= (1 << turn.bit_length() - 1) - 1
    return (turn + 1) >> 1
