"""Search for the number of MLP tiles: one linear program for each candidate, and the plan with the shortest step.

Owns the choice alone. What a number of tiles saves, holds and costs is in a profile made for it; each number is a
problem of its own, whose plan is proven best for that number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memo.mip.activation.plan import ActivationPlan, ActivationProblem
from memo.mip.activation.solver import find_plan, misfit_of

MLP_TILE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of tiles to try. Beyond 64 little is saved: a 64th of the MLP's wide activations is less than one tensor of
the hidden size."""


def solve_mlp_tiles(
    problem_of: Callable[[int], ActivationProblem], counts: Sequence[int] = MLP_TILE_COUNTS
) -> ActivationPlan:
    """Finds the number of tiles with the shortest step, the smallest such number.

    Tiles only add computation, so numbers that compute longer than the best step takes are skipped.

    Args:
        problem_of: returns the problem for a number of tiles.
        counts: numbers of tiles to try, ascending.

    Raises:
        DoesNotFit: no number of tiles fits; the message is that of the largest, which needs least memory.
        SolverFailed: the solver crashed.
    """
    best: ActivationPlan | None = None
    for count in counts:
        problem = problem_of(count)
        if best is not None and _least_s(problem) >= best.step_s:
            break
        plan = find_plan(problem)
        if plan is None:
            continue
        if best is None or plan.step_s < best.step_s:
            best = plan
        if plan.declined:
            break
    if best is None:
        misfit = misfit_of(problem)
        words = f"with MLPs in {counts[-1]} tiles, {misfit}"
        raise misfit.with_message(words) if len(counts) > 1 else misfit
    return best


def _least_s(problem: ActivationProblem) -> float:
    """Lower bound on the step: the slowest stage's computation."""
    slowest = max(stage.compute_s for stage in problem.stages)
    return problem.pipeline.microbatches * slowest + problem.profile.optimizer_s
