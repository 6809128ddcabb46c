"""Interface to HiGHS, the solver of PuLP models, in this process.

Owns the warm start: PuLP passes `warmStart` to HiGHS as an option, which HiGHS does not have, and drops the values;
here they are handed over as a solution. PuLP reports "Optimal" for a run that hit its time limit; `Solved.proven` does
not.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import highspy
import numpy as np

from memo.errors import SolverFailed


def _imported_alone(name: str) -> Any:
    """Imports in a separate thread: PuLP keeps the errors of missing solvers, and so the frames of its importer."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()


pulp: Any = _imported_alone("pulp")


def _make_first_solver() -> None:
    """Makes a solver while standard output leads nowhere: from 1.16 on the first one of a process prints its name there."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as done:  # OSError: there is no standard output
        kept, nowhere, flush = os.dup(1), os.open(os.devnull, os.O_WRONLY), ctypes.CDLL(None).fflush
        done.callback(os.close, kept)
        done.callback(os.close, nowhere)
        flush(None)
        os.dup2(nowhere, 1)
        done.callback(os.dup2, kept, 1)
        done.callback(flush, None)
        highspy.Highs()


if (highspy.HIGHS_VERSION_MAJOR, highspy.HIGHS_VERSION_MINOR) >= (1, 16):  # else no other thread's line is put at risk
    _make_first_solver()

PRIMAL_SIMPLEX = 4
"""Value of HiGHS's option simplex_strategy."""

OPTIMAL, FOUND = 1, 2
"""Values of PuLP's sol_status. With any other value the variables hold no solution."""


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


def solve_model(model: pulp.LpProblem, *, time_limit_s: float, gap: float = 0.0) -> Solved:
    """Solves a model, warm-started from the values set by `setInitialValue`.

    Args:
        model: the model.
        time_limit_s: seconds after which it gives what it has.
        gap: part of the objective by which a solution may miss the optimum and still counts as optimal, with integers.

    Returns:
        Whether a solution was found and proven; its values are in the model's variables.

    Raises:
        SolverFailed: the solver crashed or could not be run.
    """
    limit = max(time_limit_s, 0.1)
    solved = _run(model, _WarmHiGHS(msg=False, timeLimit=limit, threads=1, gapRel=gap))
    if model.solverModel.getModelStatus() == highspy.HighsModelStatus.kUnknown:
        # Its dual simplex lost its way, as in nearly infeasible programs; the primal one has not been seen to.
        solver = pulp.HiGHS(msg=False, timeLimit=limit, threads=1, gapRel=gap, simplex_strategy=PRIMAL_SIMPLEX)
        solved = _run(model, solver)
    if model.status == pulp.LpStatusUndefined:
        raise SolverFailed("HiGHS failed: it ended without a status")
    return solved


def _run(model: pulp.LpProblem, solver: Any) -> Solved:
    # PuLP goes through all rows each time that it asks for them; these do not change while it solves, nor until it resumes.
    listed = model.listed if isinstance(solver, _Resumed) else model.variables()
    model.listed, model.variables = listed, lambda: listed
    try:
        model.solve(solver)
    except Exception as error:  # PuLP lets whatever HiGHS raises through
        raise SolverFailed(f"{solver.name} failed: {type(error).__name__}: {str(error)[:200]}") from error
    finally:
        del model.variables
    infeasible = model.status == pulp.LpStatusInfeasible
    return Solved(found=model.sol_status in (OPTIMAL, FOUND), proven=infeasible or model.sol_status == OPTIMAL)


class _Resumed(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS on a model that it has solved, with some variables fixed at other values: it goes on from that solution."""

    def __init__(self, fixed: Mapping[pulp.LpVariable, float]) -> None:
        super().__init__(msg=False)
        self._fixed = fixed

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        """The model has its solver."""

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        numbers = np.array([variable.index for variable in self._fixed], dtype=np.int32)
        values = np.array(list(self._fixed.values()), dtype=np.float64)
        lp.solverModel.changeColsBounds(len(numbers), numbers, values, values)


def solve_fixed(model: pulp.LpProblem, fixed: Mapping[pulp.LpVariable, float], *, time_limit_s: float) -> Solved:
    """Solves a model without integers with these variables fixed; again with others in a fraction of the time.

    Args:
        model: the model.
        fixed: value of each variable that is ever fixed.
        time_limit_s: seconds after which it gives up.

    Raises:
        SolverFailed: the solver crashed or could not be run.
    """
    for variable, value in fixed.items():
        variable.lowBound = variable.upBound = value
    if getattr(model, "solverModel", None) is not None:
        solved = _run(model, _Resumed(fixed))
        if solved.proven:
            return solved
    return solve_model(model, time_limit_s=time_limit_s)
