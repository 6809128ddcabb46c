"""Rehearsal of a pipeline: the first rank of each stage, one after another, and the step that their turns make.

    stage 0     F0 F1 F2 B0 F3 B1 ...     each alone, with its own plan; every message is there when it is asked for
    stage 1     F0 F1 B0 F2 B1 ...
    together    memo.mip.activation.pipeline_time, as for `memo plan`

Together turns take their means and wait for messages. So copies never gain from a stage's waits, as plans have it, too.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from memo.allocator import BytelessMode
from memo.mip.activation import microbatches_s
from memo.parallel import PipelineOrder, fake_group
from memo.rehearsal.run import Rehearsal, RehearsedStep, rehearse

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.mip.activation import Pipeline
    from memo.record import Step
    from memo.rehearsal.machine import SimulatedMachine
    from memo.rehearsal.turns import RankTimes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedPipeline:
    """A rehearsed training in a pipeline."""

    pipeline: Pipeline
    stages: tuple[Rehearsal, ...]
    """Rehearsals of the first rank of each stage, whose steps wait for no other stage."""

    @property
    def times(self) -> list[RankTimes]:
        """Times of each stage's usual step; of fewer stages where one had none."""
        usual = [stage.usual_step for stage in self.stages]
        return [step.times for step in usual if step is not None and step.times is not None]

    @property
    def step_s(self) -> float | None:
        """Seconds of a step of all stages; None where a stage ended none."""
        times = self.times
        if len(times) < len(self.stages):
            return None
        return microbatches_s(self.pipeline, times, send_s=lambda giver, taker: times[giver].send_s)

    @property
    def fits(self) -> bool:
        """True where every step of every stage ran within all budgets."""
        return all(stage.fits for stage in self.stages)

    @property
    def settled_after(self) -> int | None:
        """Number of steps until each stage ran by its settled plan; None where one had none."""
        each = [stage.settled_after for stage in self.stages]
        known = [after for after in each if after is not None]
        return max(known) if len(known) == len(each) else None


def rehearse_pipeline(
    build: Callable[[], Step],
    machine: Callable[..., SimulatedMachine],
    pipeline: Pipeline,
    *,
    on_step: Callable[[int, RehearsedStep], None] = lambda stage, step: None,
    **options: Any,
) -> RehearsedPipeline:
    """Rehearses the first steps of each stage of a pipeline.

    Args:
        build: as of `rehearse`; builds the step of the rank that the process group says, with its schedule.
        machine: makes the machine of a rank; called with the keywords `rank` and `weights` of SimulatedMachine.
        pipeline: stages, schedule and microbatches.
        on_step: called with the stage and each step that has ended.
        options: further arguments of `rehearse`.

    Raises:
        RecordError: as `rehearse`.
        UsageError: as `rehearse`.
    """
    ranks = machine().ranks
    first = [stage * ranks // pipeline.stages for stage in range(pipeline.stages)]
    weights = [_weight(build, ranks, rank) for rank in first]
    stages = [
        rehearse(build, machine(rank=rank, weights=weights), on_step=functools.partial(on_step, stage), **options)
        for stage, rank in enumerate(first)
    ]
    return RehearsedPipeline(pipeline=pipeline, stages=tuple(stages))


def _weight(build: Callable[[], Step], ranks: int, rank: int) -> int:
    """Need of a rank's share of its node, as `memo.offload` has it."""
    with fake_group(ranks, rank), BytelessMode():
        step = build()
        order = PipelineOrder.of(step.schedule, step.layers or ())
    return 1 if order is None else order.weight
