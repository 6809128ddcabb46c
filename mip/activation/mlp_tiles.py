"""The tiles in which layers compute their MLP, as a variable of the plan: the number with the shortest step.

Owns the choice alone. What a number of tiles saves, holds and costs is in the profile that somebody makes for it; each is
a problem of its own, whose plan is proven best among those of that number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memo.errors import Infeasible
from memo.mip.activation.cost import stage_compute_s
from memo.mip.activation.plan import ActivationPlan, ActivationProblem
from memo.mip.activation.solver import solve_problem

__all__ = ["MLP_TILE_COUNTS", "solve_mlp_tiles"]

MLP_TILE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""More save little: a sixty-fourth of the wide activations is less than one tensor of the residual stream's width."""


def solve_mlp_tiles(
    problem_of: Callable[[int], ActivationProblem], counts: Sequence[int] = MLP_TILE_COUNTS
) -> ActivationPlan:
    """The plan with the shortest step, of as few tiles as give it; `problem_of` asks the question for a number of them.

    `counts` ascend. Tiles only add to the computation, so none are tried that compute longer than the best step takes.

    Raises:
        Infeasible: no number of tiles fits; the message is that of the most, which need least.
    """
    best: ActivationPlan | None = None
    refused: Infeasible | None = None
    for count in counts:
        problem = problem_of(count)
        if best is not None and _least_s(problem) >= best.step_s:
            break
        try:
            plan = solve_problem(problem)
        except Infeasible as error:
            refused = error
            continue
        if best is None or plan.step_s < best.step_s:
            best = plan
        if plan.declined:
            break
    if best is None:
        assert refused is not None
        raise Infeasible(f"with MLPs in {counts[-1]} tiles, {refused}" if len(counts) > 1 else str(refused))
    return best


def _least_s(problem: ActivationProblem) -> float:
    """No step is shorter than its slowest stage's computation."""
    stages = range(problem.pipeline.stages)
    slowest = max(stage_compute_s(problem, stage) for stage in stages)
    return problem.pipeline.microbatches * slowest + problem.profile.optimizer_s
