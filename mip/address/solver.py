"""Entry point of address planning: `solve(problem)` returns a checked plan, or raises with the reason.

Owns the conversion between bytes and units, the division of time among arenas, and the errors. Every plan has passed
`memo.mip.address.checker` before it is returned. MIP solvers are imported at first use: `Method.SEARCH`, which is all
that a training run needs, works without them.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Mapping

from memo.errors import Infeasible, SolverTimeout
from memo.mip.address.checker import require_valid
from memo.mip.address.instance import make_instance
from memo.mip.address.lower_bound import peak
from memo.mip.address.portfolio import ArenaSolver
from memo.mip.address.problem import AddressPlan, AddressProblem, ArenaPlan, Status
from memo.units import format_bytes


class Method(enum.StrEnum):
    """Solvers that a plan may use."""

    AUTO = "auto"
    """Portfolio, then searches; where buffers name groups, the bi-level program in between. The best result is kept."""
    SEARCH = "search"
    """Portfolio, then local and tree searches."""
    MIP = "mip"
    """Portfolio, then one flat mixed-integer program by HiGHS; for small problems and comparison."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of the work on one arena."""

    arena: str
    elapsed_s: float
    nbytes: int | None
    """Size of the best placement so far; None before the first."""
    lower_bound_nbytes: int


def solve(
    problem: AddressProblem,
    *,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    method: Method = Method.AUTO,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    known: Mapping[str, Mapping[str, int]] | None = None,
) -> AddressPlan:
    """Places every buffer, each arena as small as the time allows.

    An arena with a capacity only has to fit; one without is made smaller until it is proven optimal, within `gap` of
    the bound, or time is up. Ctrl-C ends the work early and keeps the best plan, if there is one.

    Args:
        problem: the buffers.
        time_limit_s: for all arenas together, the check of the plan included. Each arena has a placement within
            milliseconds, so one without a capacity always has a plan.
        gap: accepted excess over the lower bound, as a fraction of it.
        method: the solvers to use.
        seed: of the search; equal inputs and seeds that end before the time limit give equal plans.
        progress: called after each change of an arena's size or bound.
        known: placements from elsewhere, by name: offset in bytes by buffer id. No plan is larger than one of them.

    Raises:
        Infeasible: proven; the message names the arena, the instant, and what would fit.
        SolverTimeout: no plan within the capacities was found in time, and none was proven impossible.
        SolverFailed: a MIP solver crashed.
        KeyboardInterrupt: Ctrl-C before there was a plan.
    """
    began = time.monotonic()
    offsets: dict[str, int] = {}
    arenas = []
    names = problem.arenas
    end = began + time_limit_s
    for done, name in enumerate(names):
        prepared = time.monotonic()
        work = _ArenaWork(problem, name, seed=seed, began=began, progress=progress, known=known or {})
        now = time.monotonic()
        end -= now - prepared  # the check of the plan takes about as long as the preparation did
        deadline = now + (end - now) / (len(names) - done)
        arenas.append(work.run(deadline=deadline, gap=gap, method=method))
        offsets.update(work.offsets)
    plan = AddressPlan(
        problem=problem,
        offsets=tuple(offsets[buffer.id] for buffer in problem.buffers),
        arenas=tuple(arenas),
        seed=seed,
    )
    require_valid(plan)
    return plan


class _ArenaWork:
    """Planning of one arena, from its buffers in bytes to its part of the plan."""

    def __init__(
        self,
        problem: AddressProblem,
        name: str,
        *,
        seed: int,
        began: float,
        progress: Callable[[Progress], None] | None,
        known: Mapping[str, Mapping[str, int]],
    ) -> None:
        self._known = known
        self._problem, self._name, self._began, self._progress = problem, name, began, progress
        everything = problem.of(name)
        self._buffers = [buffer for buffer in everything if buffer.nbytes]
        self._instance = make_instance(self._buffers, alignment=problem.alignment)
        capacity = problem.capacities.get(name)
        self._capacity = capacity
        self.offsets: dict[str, int] = {buffer.id: 0 for buffer in everything if not buffer.nbytes}
        self._solver = ArenaSolver(
            self._instance,
            capacity=None if capacity is None else capacity // self._instance.unit,
            seed=seed,
            report=self._report,
        )

    def run(self, *, deadline: float, gap: float, method: Method) -> ArenaPlan:
        solver = self._solver
        self._report(solver)
        try:
            if method is Method.MIP:
                from memo.mip.address.milp import solve_flat

                solve_flat(solver, deadline=deadline)
            else:
                solver.portfolio(deadline=deadline, gap=gap)
                self._follow_known(deadline=deadline, gap=gap)
                grouped = method is Method.AUTO and any(buffer.group for buffer in self._buffers)
                if grouped and not solver.done(deadline=deadline, gap=gap):
                    from memo.mip.address.bilevel import solve_by_layers

                    solve_by_layers(solver, self._buffers, alignment=self._problem.alignment, deadline=deadline)
                solver.search(deadline=deadline, gap=gap)
        except KeyboardInterrupt:
            if not solver.fits:
                raise
        if solver.impossible or not solver.fits:
            raise self._no_plan(proven=solver.impossible)
        unit = self._instance.unit
        pairs = zip(self._buffers, solver.offsets, strict=True)
        self.offsets |= {buffer.id: offset * unit for buffer, offset in pairs}
        return ArenaPlan(
            name=self._name,
            nbytes=(solver.upper or 0) * unit,
            lower_bound_nbytes=solver.lower * unit,
            status=Status.OPTIMAL if solver.optimal else Status.FEASIBLE,
            method=solver.method or "nothing to place",
        )

    def _follow_known(self, *, deadline: float, gap: float) -> None:
        """Follows the known placements that have all of this arena's buffers."""
        for name, offsets in self._known.items():
            if self._solver.done(deadline=deadline, gap=gap):
                return
            if all(buffer.id in offsets for buffer in self._buffers):
                places = [(offsets[buffer.id], index) for index, buffer in enumerate(self._buffers)]
                self._solver.follow([index for _, index in sorted(places)], f"first fit by {name}", deadline=deadline)

    def _no_plan(self, *, proven: bool) -> Infeasible | SolverTimeout:
        solver, unit, capacity = self._solver, self._instance.unit, self._capacity or 0
        known = f"; {format_bytes(solver.upper * unit, up=True)} are known to do" if solver.upper else ""
        least = format_bytes(solver.lower * unit, down=True)
        if not proven:
            return SolverTimeout(
                f"arena {self._name!r}: no plan within {format_bytes(capacity)} was found in time (no plan can be below "
                f"{least}{known}); give it more time or a larger capacity"
            )
        at, load = peak(self._buffers, alignment=self._problem.alignment)
        if load > capacity:
            words = (
                f"at instant {at} the live buffers need {format_bytes(load)}, "
                f"{format_bytes(load - capacity, up=True)} more than its capacity of {format_bytes(capacity)}"
            )
        else:
            words = (
                f"no placement is within {format_bytes(capacity)}, though at most {format_bytes(load, up=True)} are live "
                "at once"
            )
        return Infeasible(f"arena {self._name!r}: {words}; it takes at least {least}{known}")

    def _report(self, solver: ArenaSolver) -> None:
        if self._progress is not None:
            unit = self._instance.unit
            self._progress(
                Progress(
                    arena=self._name,
                    elapsed_s=time.monotonic() - self._began,
                    nbytes=None if solver.upper is None else solver.upper * unit,
                    lower_bound_nbytes=solver.lower * unit,
                )
            )
