"""Other numbers of layers of a pipeline's stages: single layers that move from one stage to another.

Owns the choice of moves, by memory and by time; the search plans the results. Both are heuristics: a move is taken only
where a plan shows that it helps, and one layer moves at a time.

    moved      of a plan: one layer of the slowest stage goes to one of the fastest, which keeps more or computes less
    roomier    of a problem that does not fit: layers go from the fullest stage to the emptiest, until every stage fits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memo.mip.activation import device_peak_candidates, layers_of_runs

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan, ActivationProblem, StageView
    from memo.mip.inputs import LayerProfile

MOST_TAKERS = 3
"""Fastest stages that a layer of the slowest one is tried on."""
MOST_STEPS = 32
"""Most layers that are moved until every stage has room."""
MOST_TURNS = 1 << 12
"""Turns of all ranks of the longest pipeline of which layers are moved for memory, as each move examines all of them."""


def moved_layers(plan: ActivationPlan) -> list[tuple[int, ...]]:
    """Numbers of layers of the runs with one layer of the slowest stage on one of the fastest stages."""
    problem = plan.problem
    by_speed = sorted(range(len(plan.stages)), key=lambda stage: (plan.stages[stage].microbatch_s, -stage))
    found = (_moved(problem, by_speed[-1], taker) for taker in by_speed[:-1][:MOST_TAKERS])
    return [layers for layers in found if layers is not None]


def roomier_layers(
    problem: ActivationProblem, problem_of: Callable[[tuple[int, ...]], ActivationProblem | None]
) -> tuple[int, ...] | None:
    """Numbers of layers with which the fullest stage lacks less memory; None where no move helps.

    Args:
        problem: of equal or other numbers of layers.
        problem_of: returns the same problem with these numbers of layers; None where it cannot be.
    """
    pipeline = problem.pipeline
    if pipeline.stages == 1 or pipeline.stages * pipeline.chunks * pipeline.microbatches > MOST_TURNS:
        return None
    if _is_hopeless(problem):
        return None
    lacking = [_lacking_bytes(stage) for stage in problem.stages]
    fitted, layers = max(lacking) <= 0, None
    for _ in range(MOST_STEPS):
        if sum(lacking) > 0 or (max(lacking) <= 0 and not fitted):
            break  # no division fits, or this one does
        giver, taker = lacking.index(max(lacking)), lacking.index(min(lacking))
        tried = _moved(problem, giver, taker)
        changed = None if tried is None else problem_of(tried)
        if changed is None:
            break
        after = [_lacking_bytes(stage) for stage in changed.stages]
        if max(after[giver], after[taker]) >= lacking[giver]:
            break
        problem, lacking, layers = changed, after, tried
    return layers


def _moved(problem: ActivationProblem, giver: int, taker: int) -> tuple[int, ...] | None:
    """Numbers of layers after one has moved from the largest run of a stage to the smallest of another."""
    sizes, pipeline = list(layers_of_runs(problem)), problem.pipeline
    gives = max(pipeline.chunk_positions(giver), key=lambda run: (sizes[run], -run))
    takes = min(pipeline.chunk_positions(taker), key=lambda run: (sizes[run], -run))
    if sizes[gives] == 1:
        return None
    sizes[gives] -= 1
    sizes[takes] += 1
    return tuple(sizes)


def _is_hopeless(problem: ActivationProblem) -> bool:
    """Whether all stages together lack memory, or the first or the last lacks it with one layer in each run."""
    stages = problem.stages
    if sum(stage.static.nbytes for stage in stages) > sum(stage.machine.budgets.device_bytes for stage in stages):
        return True
    return any(_lacking_bytes(stage, fewest=True) > 0 for stage in (stages[0], stages[-1]))


def _lacking_bytes(stage: StageView, *, fewest: bool = False) -> float:
    """Bytes by which a stage exceeds its device's budget with as little kept as can be; negative ones are room.

    Args:
        stage: the stage.
        fewest: a lower bound of these bytes with one layer in each of the stage's runs.
    """
    own, budgets = stage.layers, stage.machine.budgets
    moves = budgets.host_bytes > 0 or budgets.disk_bytes > 0
    counted = stage.pipeline.chunks if fewest else len(own)
    least = [0 if moves or number >= counted else _least_bytes(layer) for number, layer in enumerate(own)]
    held = max(
        place.resident_bytes
        + sum((kept + rest) * nbytes for kept, rest, nbytes in zip(place.kept, place.unmoved, least, strict=True))
        for place in device_peak_candidates(stage, likely_only=True)
    )
    freed = sum(layer.static_bytes for layer in own[counted:])
    freed += max((layer.full_bytes for layer in own[counted:]), default=0)  # of one layer there is one rounding buffer
    return float(held - freed - budgets.device_bytes)


def _least_bytes(layer: LayerProfile) -> int:
    """Bytes that a layer saves if it recomputes all it can."""
    return layer.fixed_bytes + layer.points[-1].saved_bytes
