"""Runs under torchrun on two ranks with two stages each: plans that count what a rank holds of each, turn by turn."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from contextlib import closing
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from bytes_worker import LAYER
from equality_worker import CPU
from plans_worker import divided, managed, only_saved_tensors, require_equal, run

import memo.manager
from memo.mip.activation import ActivationPlan
from memo.mip.schedules import PipelineSchedule
from memo.parallel.course import Course
from memo.parallel.layout import Layout
from memo.parallel.world import World, join

SCHEDULES = [schedule for schedule in PipelineSchedule if schedule.stages_per_rank > 1]
STEPS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What became of one rank's run, in a step of the plan that it ended with."""

    plan: ActivationPlan
    peak: int
    moved: int
    """Bytes that left the device."""
    computed_again: int


def planned(world: World, budget: int, **how: object) -> Ran:
    """Gradients are those of a run without memo, bit by bit."""
    _, plain = divided(world)
    stages, trainer = divided(world)
    counts: list[tuple[int, int]] = []
    with closing(managed(stages, trainer, world, device=budget, **how)) as manager:
        stats = manager.stats

        def note() -> None:
            counts.append((stats.bytes_host + stats.bytes_disk, stats.bytes_recomputed))

        require_equal(run(trainer, STEPS, note), run(plain, STEPS))
        assert manager.plan is not None, manager.report()
        (moved, again), (moved_before, again_before) = counts[-1], counts[-2]
        return Ran(
            plan=manager.plan,
            peak=stats.peak_device_bytes,
            moved=moved - moved_before,
            computed_again=again - again_before,
        )


def by_the_larger_number(world: World, budget: int) -> Ran:
    """The same without knowing the turns: all of a rank's layers hold as many microbatches as any of them does."""
    told = Course.of
    Course.of = lambda *args: dataclasses.replace(told(*args), turns=None)  # type: ignore[method-assign]
    try:
        return planned(world, budget)
    finally:
        Course.of = told  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*whole tensors|the plan for|PuLP|Constructing")
    memo.manager.device_memory = only_saved_tensors
    with join(CPU):
        for schedule in SCHEDULES:
            world = World.of(Layout(pp=2, schedule=schedule), "cpu")
            for size in map(float, sys.argv[1:]):
                budget = int(size * LAYER)
                mine, before = planned(world, budget), by_the_larger_number(world, budget)
                for name, ran in (("turns", mine), ("held", before)):
                    p = ran.plan
                    print(
                        schedule,
                        size,
                        "rank",
                        world.pp,
                        name,
                        "peak",
                        round(ran.peak / LAYER, 2),
                        "pred",
                        round(p.stages[0].peak_device_bytes / LAYER, 2),
                        "moved",
                        round(ran.moved / LAYER, 2),
                        "again",
                        round(ran.computed_again / LAYER, 2),
                        "declined",
                        p.declined,
                        flush=True,
                    )


if __name__ == "__main__":
    main()
