"""Solver of one arena: a portfolio of greedy fits, then restarted tree searches, until the bound is met or time is up.

Owns the incumbent and the lower bound. Invariant: `lower` is proven, and `offsets` fit in `upper` units; the two only
approach each other. Work is limited by nodes, not by seconds, so that two runs which both end before the time limit
give the same plan on machines of any speed.

    greedy fits ─▶ upper ── tree search at a capacity in [lower, upper) ─▶ found: upper = its height
                                                                       └▶ impossible: lower = that capacity + 1
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from memo.mip.address.buffer_orders import portfolio_orders, search_orders
from memo.mip.address.instance import Instance
from memo.mip.address.native_search import Answer, Engine, make_engine

__all__ = ["ArenaSolver"]

NODE_LIMIT = 4000
"""Nodes of the shortest searches: some order solves each of MiniMalloc's instances A to F within about this many."""
FIRST_NODE_LIMIT = 20_000
"""Nodes of the searches by named orders, which succeed at once more often than others."""
NAMED_ORDERS = 3
CYCLE, NEAR = 4, 0.02
"""Targets of searches without a capacity: of every CYCLE, all but one are the lower bound when the incumbent is within
the fraction NEAR of it, else one is; the others lie between the bound and the incumbent."""


class ArenaSolver:
    """Incumbent and lower bound of one instance, and the methods that close the gap between them.

    Args:
        instance: the arena's buffers.
        capacity: a size in units that is good enough; None asks for the smallest.
        seed: of the search's orders.
        report: called after each change of incumbent or bound.
        engine: the inner loops; compiled where possible by default.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        capacity: int | None = None,
        seed: int = 0,
        report: Callable[[ArenaSolver], None] | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.instance = instance
        self.lower = instance.lower_bound
        self.upper: int | None = None
        self.offsets: tuple[int, ...] = ()
        self.method = ""
        self.nodes = 0
        self._capacity, self._seed = capacity, seed
        self._report = report or (lambda _: None)
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
        """Runs portfolio and search until `done`."""
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
        """Runs greedy fit in every order of the portfolio until `done`."""
        if self.impossible or self.optimal:
            return
        for name, order in portfolio_orders(self.instance):
            for best in (False, True):
                offsets = self._engine.fit(order, best=best, deadline=deadline)
                if offsets is None:
                    return
                # Greedy fit puts movable buffers around the fixed ones, so what it returns always holds.
                self.offer(offsets, f"{'best' if best else 'first'} fit by {name}")
                if self.done(deadline=deadline, gap=gap):
                    return

    def follow(self, order: Sequence[int], method: str, *, deadline: float) -> None:
        """Runs greedy fit in the order of a known placement, from the lowest buffer up.

        The result is never worse than that placement: no buffer gets a higher offset than it had there.
        """
        offsets = self._engine.fit(list(order), best=False, deadline=deadline)
        if offsets is not None:
            self.offer(offsets, method)

    def search(self, *, deadline: float, gap: float = 0.0) -> None:
        """Runs tree searches, one order after the other, until `done`."""
        if self.done(deadline=deadline, gap=gap):
            return
        conflicts = array("q", bytes(8 * self.instance.n_sections))
        shortest = max(NODE_LIMIT, self.instance.n * 3 // 2)
        first = max(FIRST_NODE_LIMIT, shortest)
        halvings = 1
        for turn, order in enumerate(search_orders(self.instance, seed=self._seed, conflicts=conflicts)):
            target = self._target(turn, halvings)
            outcome = self._engine.search(
                order,
                capacity=target,
                node_limit=first if turn < NAMED_ORDERS else shortest * luby(turn - NAMED_ORDERS + 1),
                deadline=deadline,
                conflicts=conflicts,
            )
            self.nodes += outcome.nodes
            if outcome.answer is Answer.FOUND:
                self.offer(outcome.offsets, "tree search")
                halvings = 1
            elif outcome.answer is Answer.IMPOSSIBLE:
                self.lower = max(self.lower, target + 1)
                self._report(self)
            elif target > self.lower:
                halvings += 1
            if self.done(deadline=deadline, gap=gap):
                return

    def _target(self, turn: int, halvings: int) -> int:
        """Capacity of the next search: the user's, the lower bound, or at times a point nearer to the incumbent."""
        if self._capacity is not None:
            return self._capacity
        if self.upper is None or turn < NAMED_ORDERS:
            return self.lower
        near = self.upper <= self.lower * (1 + NEAR)
        if turn % CYCLE < (CYCLE - 1 if near else 1):
            return self.lower
        step = (self.upper - self.lower) >> halvings
        return max(self.lower, self.upper - max(1, step))


def luby(turn: int) -> int:
    """Luby's restart sequence: 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ... for turn 1, 2, ..."""
    while turn & (turn + 1):
        turn -= (1 << turn.bit_length() - 1) - 1
    return (turn + 1) >> 1
