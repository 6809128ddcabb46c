"""Interface to the two solvers of PuLP models: HiGHS in this process, and CBC as a program.

Owns the warm start: PuLP passes `warmStart` to HiGHS as an option, which HiGHS does not have, and drops the values;
here they are handed over as a solution. PuLP reports "Optimal" for a run that hit its time limit; `Solved.proven` does
not.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import highspy

from memo.errors import SolverFailed

__all__ = ["Backend", "Solved", "pulp", "solve_model"]


def _imported_alone(name: str) -> Any:
    """Imports in a separate thread: PuLP keeps the errors of missing solvers, and so the frames of its importer."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()


pulp: Any = _imported_alone("pulp")

PRIMAL_SIMPLEX = 4
"""Value of HiGHS's option simplex_strategy."""

OPTIMAL, FOUND = 1, 2
"""Values of PuLP's sol_status. With any other value the variables hold no solution."""


class Backend(enum.StrEnum):
    """The solver of a model."""

    HIGHS = "highs"
    CBC = "cbc"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """Outcome of a solver run."""

    found: bool
    """The model's variables hold a solution, within the solver's tolerances."""
    proven: bool
    """The solver claims that the solution is optimal or, if none was found, that none exists."""


class _WarmHiGHS(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS, started from the variables' initial values."""

    def callSolver(self, lp: pulp.LpProblem) -> None:
        start = highspy.HighsSolution()
        start.col_value = [variable.varValue or 0.0 for variable in lp.variables()]
        lp.solverModel.setSolution(start)
        lp.solverModel.run()


def solve_model(model: pulp.LpProblem, *, backend: Backend, time_limit_s: float, gap: float = 0.0) -> Solved:
    """Solves a model, warm-started from the values set by `setInitialValue`.

    Args:
        model: the model.
        backend: the solver.
        time_limit_s: seconds after which it gives what it has.
        gap: part of the objective by which a solution may miss the optimum and still counts as optimal, with integers.

    Returns:
        Whether a solution was found and proven; its values are in the model's variables.

    Raises:
        SolverFailed: the solver crashed or could not be run.
    """
    limit = max(time_limit_s, 0.1)
    if backend is Backend.CBC:
        solver = pulp.PULP_CBC_CMD(msg=False, timeLimit=limit, threads=1, warmStart=True, gapRel=gap)
    else:
        solver = _WarmHiGHS(msg=False, timeLimit=limit, threads=1, gapRel=gap)
    try:
        model.solve(solver)
        if backend is Backend.HIGHS and model.solverModel.getModelStatus() == highspy.HighsModelStatus.kUnknown:
            # Its dual simplex lost its way, as in nearly infeasible programs; the primal one has not been seen to.
            solver = pulp.HiGHS(msg=False, timeLimit=limit, threads=1, gapRel=gap, simplex_strategy=PRIMAL_SIMPLEX)
            model.solve(solver)
    except Exception as error:  # PuLP lets whatever its backends raise through
        raise SolverFailed(f"{backend.value} failed: {type(error).__name__}: {str(error)[:200]}") from error
    if model.status == pulp.LpStatusUndefined:
        raise SolverFailed(f"{backend.value} failed: it ended without a status")
    infeasible = model.status == pulp.LpStatusInfeasible
    return Solved(found=model.sol_status in (OPTIMAL, FOUND), proven=infeasible or model.sol_status == OPTIMAL)
