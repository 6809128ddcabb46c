"""Lower bounds on a candidate's step, each a part of what its plan is predicted to take, from the cheapest to the tightest.

Every bound is about the cost model of `memo.mip.activation`: no plan of the candidate has a shorter predicted step.

    compute        the step's FLOPs on all GPUs at the highest rate; then the slowest stage's work of all microbatches,
                   and the optimizer
    communication  with the collectives that nothing hides, gathers and reductions of weights included
    bubble         with the waits of the pipeline's stages: the step if everything were kept
    budget         with what the budgets cannot hold moved or recomputed: the planner's linear program, relaxed
    memory         no plan fits: what a rank holds in any case, or what it cannot move or recompute
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING

from memo.errors import SolverFailed
from memo.mip.activation import (
    ActivationPlan,
    LayerPlan,
    device_peak_candidates,
    predict_kept_times,
    predict_stages,
    relaxed_step_s,
)

if TYPE_CHECKING:
    from memo.mip.activation import ActivationProblem, PeakCandidate, StageView
    from memo.mip.inputs import EmbeddingOrHeadProfile, LayerProfile

STAGES = 6
"""Stages of a pipeline whose memory counts."""
SAFETY = 1e-6
"""Fraction that is taken off a solver's answer for its tolerances."""


class Bound(enum.StrEnum):
    """Kind of a bound: what makes a candidate take so long."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    BUBBLE = "bubble"
    BUDGET = "budget"
    MEMORY = "memory"


@dataclasses.dataclass(frozen=True, slots=True)
class BoundSequence:
    """Bounds of a candidate, or of several at once, in ascending order."""

    steps: tuple[tuple[Bound, float], ...] = ()

    @property
    def seconds(self) -> float:
        """The highest bound."""
        return self.steps[-1][1] if self.steps else 0.0

    def raised(self, *more: tuple[Bound, float]) -> BoundSequence:
        """With further bounds, of which those that are not higher are left out."""
        steps = list(self.steps)
        for kind, seconds in more:
            if not steps or seconds > steps[-1][1]:
                steps.append((kind, seconds))
        return BoundSequence(tuple(steps))

    def kind(self, beyond_s: float) -> Bound:
        """The kind of the first bound above `beyond_s`, or of the highest."""
        return next((kind for kind, seconds in self.steps if seconds > beyond_s), self.steps[-1][0])


def work_bounds(problem: ActivationProblem) -> BoundSequence:
    """Bounds by the slowest stage's work, under any schedule, division of the layers and sharding.

    Of a problem in which nothing is sharded: the optimizer's step depends on the sharding and is left out. A stage has a
    part of all work at least, and some stage as many layers as an equal division gives one at most. Where stages have
    machines of their own, of this division of the layers alone.
    """
    profile, pipeline = problem.profile, problem.pipeline
    known, times = profile.layer_profiles(), pipeline.microbatches
    most = -(-len(known) // pipeline.stages)
    parts: list[LayerProfile | EmbeddingOrHeadProfile] = [*known, profile.embedding, profile.head]
    work, exchanged = zip(*map(_work_s, parts), strict=True)
    layers_s = [work_s - exchanged_s for work_s, exchanged_s in zip(work, exchanged, strict=True)][: len(known)]
    alone = max((math.fsum(work) - math.fsum(exchanged)) / pipeline.stages, most * min(layers_s))
    waiting = max(math.fsum(work) / pipeline.stages, most * min(work[: len(known)]))
    return BoundSequence().raised((Bound.COMPUTE, times * alone), (Bound.COMMUNICATION, times * waiting))


def _work_s(part: LayerProfile | EmbeddingOrHeadProfile) -> tuple[float, float]:
    """Seconds of a microbatch's two passes, and those of them in which it waits for collectives."""
    return part.forward_s + part.backward_s, part.forward_exchange_s + part.backward_exchange_s


def kept_bounds(problem: ActivationProblem) -> tuple[BoundSequence, ActivationPlan]:
    """Bounds by the step that keeps everything, and that plan, whether or not it fits, without its peaks."""
    layers = (LayerPlan(),) * len(problem.profile.layers)
    plan = ActivationPlan(problem=problem, layers=layers, stages=predict_kept_times(problem))
    last, times = problem.update, problem.pipeline.microbatches
    alone = times * max(stage.compute_s for stage in plan.stages) + last.optimizer_s
    waiting = max(times * stage.microbatch_s + stage.sync_s for stage in plan.stages)
    waiting += last.optimizer_s + last.optimizer_exchange_s
    found = BoundSequence().raised((Bound.COMPUTE, alone), (Bound.COMMUNICATION, waiting), (Bound.BUBBLE, plan.step_s))
    return found, plan


def schedule_bounds(problem: ActivationProblem) -> BoundSequence:
    """Bounds by a schedule, under any sharding: of a problem in which nothing is sharded.

    Reductions of gradients and the optimizer's step depend on the sharding and are left out.
    """
    stages = [dataclasses.replace(stage, sync_s=0.0) for stage in predict_kept_times(problem)]
    bare = dataclasses.replace(problem.profile, optimizer_s=0.0, optimizer_exchange_s=0.0)
    machines = tuple(
        dataclasses.replace(machine, optimizer_s=0.0, optimizer_exchange_s=0.0) for machine in problem.machines
    )
    plan = ActivationPlan(
        problem=dataclasses.replace(problem, profile=bare, machines=machines),
        layers=(LayerPlan(),) * len(problem.profile.layers),
        stages=tuple(stages),
    )
    return work_bounds(problem).raised((Bound.BUBBLE, plan.step_s))


def has_room(problem: ActivationProblem) -> bool:
    """Whether the device may hold what every plan holds in any case; if not, no plan fits.

    Static bytes are looked at first, then the likely peaks of the stages whose memory counts.
    """
    stages = problem.without_overlap.stages
    counted = [stages[number] for number in _counted_stages(problem.pipeline.stages)]
    if any(stage.static.nbytes > stage.machine.budgets.device_bytes for stage in counted):
        return False
    return all(
        place.resident_bytes <= stage.machine.budgets.device_bytes
        for stage in counted
        for place in device_peak_candidates(stage, likely_only=True)
    )


def keeps_all(kept: ActivationPlan) -> bool:
    """Whether the plan that keeps everything fits the device."""
    problem = kept.problem
    budgets = [stage.machine.budgets.device_bytes for stage in problem.stages]
    if any(_kept_bytes(stage) > budget for stage, budget in zip(problem.stages, budgets, strict=True)):
        return False
    predictions = predict_stages(problem, kept.layers)
    return all(stage.peak_device_bytes <= budget for stage, budget in zip(predictions, budgets, strict=True))


def budget_bound(problem: ActivationProblem) -> float:
    """Bound by the planner's program with layers free to mix points; infinite where no plan fits, 0 if the solver fails."""
    try:
        least_s = relaxed_step_s(problem)
    except SolverFailed:  # HiGHS loses its way in a few programs; the candidate is planned on its other bounds
        return 0.0
    return math.inf if least_s is None else least_s * (1 - SAFETY)


def _counted_stages(count: int) -> list[int]:
    """Stages of a pipeline of `count` whose memory counts."""
    if count <= STAGES:
        return list(range(count))
    return sorted({place * (count - 1) // (STAGES - 1) for place in range(STAGES)})


def _whole_bytes(place: PeakCandidate, stage: StageView) -> int:
    """Bytes on the device at a place if everything is kept."""
    held = zip(place.kept, place.unmoved, stage.layers, strict=True)
    return place.resident_bytes + sum((kept + unmoved) * layer.full_bytes for kept, unmoved, layer in held)


def _kept_bytes(stage: StageView) -> int:
    """Bytes on the device at the fullest of the moments that count, if everything is kept."""
    return max(_whole_bytes(place, stage) for place in device_peak_candidates(stage, likely_only=True))
