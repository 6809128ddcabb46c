"""Runs under torchrun on two ranks with two stages each: plans that count what a rank holds of each, turn by turn."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from bytes_worker import LAYER, LAYERS, MICROBATCHES
from equality_worker import CPU
from launching import SCHEDULES
from plans_worker import Steps, divided, managed, require_equal, run
from saved_tensors_machine import SavedTensorsMachine

from memo.errors import PlanError
from memo.manager import use_machine
from memo.mip.activation import ActivationPlan, ActivationProblem, Budgets, Pipeline, solve_problem
from memo.mip.inputs import PipelineSchedule
from memo.parallel import Layout, World, gather_values, join

TWO = [schedule for schedule in SCHEDULES if schedule.default_chunks > 1]
LARGEST = LAYER // 4
"""Storage of a layer."""
STEPS = 6
SETTLED = 2
"""Steps at the end in which the plan is in force."""
BUDGET = 7 * LAYER
"""All of a rank's layers for all microbatches in flight are 8 to 10; counted as one number for both stages, 12 and more."""


def measured(world: World, plain: Steps) -> ActivationPlan:
    """Made while the model trains. Gradients are those of a run without memo, bit by bit, and the budget is kept."""
    stages, trainer = divided(world)
    peaks: list[int] = []
    moved: list[int] = []
    with closing(managed(stages, trainer, world, device=BUDGET)) as manager:
        stats = manager.stats

        def note() -> None:
            peaks.append(stats.peak_device_bytes)
            moved.append(stats.bytes_host + stats.bytes_recomputed)

        require_equal(run(trainer, STEPS, note), plain)
        assert manager.plan is not None, manager.report()
        plan = manager.plan
    assert max(peaks) <= BUDGET, (world.pp, [peak / LAYER for peak in peaks])
    assert plan.problem.pipeline.own is not None
    least = less_than_by_the_larger_number(plan)
    rounded = least + 2 * LARGEST if least else 0  # in each of two passes what is kept may lack a storage
    assert moved[-1] - moved[-2] <= MICROBATCHES * rounded, (world.pp, (moved[-1] - moved[-2]) / LAYER, least / LAYER)
    return plan


def less_than_by_the_larger_number(plan: ActivationPlan) -> float:
    """Bytes that a microbatch does not keep; they are fewer than if both stages held as many as the fuller one."""
    pipeline = plan.problem.pipeline
    held = max(max(counts) for counts in pipeline.peak_in_flight(0))
    alike = Pipeline(microbatches=pipeline.microbatches, held=held)
    before = solve_problem(dataclasses.replace(plan.problem, pipeline=alike))
    mine, others = unkept(plan), unkept(before)
    assert mine < 0.8 * others or mine == others == 0, (mine / LAYER, others / LAYER)
    print(
        f"rank {dist.get_rank()}: {mine / LAYER:.2f} layers of each microbatch not kept, {others / LAYER:.2f} else",
        flush=True,
    )
    return mine


def unkept(plan: ActivationPlan) -> float:
    layers = plan.problem.profile.layer_profiles()
    return sum(
        known.full_bytes - part.saved_bytes(known) * part.kept for known, part in zip(layers, plan.layers, strict=True)
    )


def of_all_ranks(plan: ActivationPlan, schedule: PipelineSchedule) -> ActivationPlan:
    """Made for the whole pipeline at once, with host memory for a part of it."""
    profile = plan.problem.profile
    profile = dataclasses.replace(profile, layers=profile.layers[:1] * LAYERS)
    budgets = Budgets(device_bytes=BUDGET, host_bytes=9 * LAYER, ranks_per_node=2)
    pipeline = Pipeline(stages=2, microbatches=MICROBATCHES, stage_ranks=1, schedule=schedule)
    hardware = plan.problem.hardware
    return solve_problem(ActivationProblem(profile=profile, hardware=hardware, budgets=budgets, pipeline=pipeline))


def carried_out(world: World, plan: ActivationPlan, plain: Steps) -> None:
    """A plan made beforehand."""
    stages, trainer = divided(world)
    with closing(managed(stages, trainer, world, device=BUDGET, plan=plan)) as manager:
        require_equal(run(trainer, SETTLED), plain[:SETTLED])
        own, peak = manager.plan, manager.stats.peak_device_bytes
        assert own is not None
        assert own.stages == (plan.stages[world.pp],)
        # A storage of which a part stays is beside itself while that part is copied.
        assert peak <= own.stages[0].peak_device_bytes + LARGEST, (world.pp, peak / LAYER)
        all_stays = all(layer.kept == 1 and layer.point == "all" for layer in own.layers)
        assert all_stays == (manager.stats.bytes_recomputed + manager.stats.bytes_host == 0)
        assert not all_stays or world.pp > 0, "the first rank holds the most"
    print(f"rank {world.rank}: peak {peak / LAYER:.2f} of {own.stages[0].peak_device_bytes / LAYER:.2f}", flush=True)


def refused(world: World, plan: ActivationPlan) -> str:
    stages, trainer = divided(world)
    try:
        managed(stages, trainer, world, device=BUDGET, plan=plan).close()
    except PlanError as error:
        return str(error)
    return ""


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*whole tensors|the plan for")
    before: ActivationPlan | None = None
    with join(CPU), use_machine(SavedTensorsMachine()):
        for schedule in TWO:
            world = World.of(Layout(pp=2, schedule=schedule), "cpu")
            _, trainer = divided(world)
            plain = run(trainer, STEPS)
            plan = gather_values(of_all_ranks(measured(world, plain), schedule))[0]
            carried_out(world, plan, plain)
            if before is not None:
                assert refused(world, before), (schedule, before.problem.pipeline.schedule)
            before = plan
            if world.rank == 0:
                print(f"{schedule}: planned by turns", flush=True)


if __name__ == "__main__":
    main()
