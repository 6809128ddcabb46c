"""Runs under torchrun on two ranks: plans made while a divided GPT trains, and what a schedule says of the first step."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from bytes_worker import HIDDEN, LAYER, MICROBATCHES, ROWS, SMALLEST, shape
from equality_worker import CPU, SEED, SEQ, Drawn, training
from launching import SCHEDULES
from saved_tensors_machine import SavedTensorsMachine

import memo
from memo.gpt.model.build_rank import build_stages
from memo.gpt.model.pipeline_stage import PipelineStage
from memo.gpt.train import ParallelTrainer
from memo.manager import Manager, use_machine
from memo.mip.activation import ActivationPlan
from memo.parallel import Layout, PipelineSchedule, World, gather_values, join
from memo.swap import Group
from memo.swap.engine.layer_calls import LayerCalls
from memo.swap.engine.saved_storage import AWAY

HOST = 256 << 20
Steps = list[tuple[float, float, list[torch.Tensor]]]


def divided(world: World) -> tuple[list[PipelineStage], ParallelTrainer]:
    stages = build_stages(shape(), world, seq=SEQ, device=CPU, dtype=torch.float32, seed=SEED)
    return stages, ParallelTrainer(stages, world, Drawn(), training(MICROBATCHES), device=CPU, rows=ROWS)


def managed(
    stages: list[PipelineStage], trainer: ParallelTrainer, world: World, *, told: bool = True, **how: object
) -> Manager:
    """As `memo train` opens it."""
    manager = memo.offload(
        nn.ModuleList(stages),
        host=HOST,
        min_bytes=SMALLEST,
        layers=[layer for stage in stages for layer in stage.layers.values()],
        group=world.layer_ranks.get_group(),
        schedule=trainer.schedule if told else None,
        **how,  # type: ignore[arg-type]
    )
    trainer.around_forward = manager
    return manager


def run(trainer: ParallelTrainer, steps: int, after: Callable[[], None] = lambda: None) -> Steps:
    """Loss, norm and gradients of each step."""
    seen: list[torch.Tensor] = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(local(p.grad) for p in trainer.model.parameters() if p.grad is not None)
    )
    done = []
    for step in range(1, steps + 1):
        result = trainer.step(step)
        assert result is not None
        done.append((result.loss, result.grad_norm, list(seen)))
        seen.clear()
        after()
    return done


def local(grad: torch.Tensor) -> torch.Tensor:
    return getattr(grad, "_local_tensor", grad).clone()


def require_equal(got: Steps, want: Steps) -> None:
    for (loss, norm, grads), (loss0, norm0, grads0) in zip(got, want, strict=True):
        assert (loss, norm) == (loss0, norm0)
        assert len(grads) == len(grads0) > 0
        assert all(torch.equal(grad, grad0) for grad, grad0 in zip(grads, grads0, strict=True))


def planned(world: World, budget: int, *, steps: int = 9) -> tuple[ActivationPlan, int, list[str]]:
    """The plan in force at the end, the highest peak of all phases, and the phases; gradients equal those without memo."""
    _, plain = divided(world)
    stages, trainer = divided(world)
    phases: list[str] = []
    with closing(managed(stages, trainer, world, device=budget)) as manager:

        def note() -> None:
            assert manager._plan_source is not None
            use = manager._plan_source.outcome()
            assert use is not None
            phases.append(use.phase)

        require_equal(run(trainer, steps, note), run(plain, steps))
        assert manager.plan is not None, manager.report()
        return manager.plan, manager.stats.peak_device_bytes, phases


def kept(plan: ActivationPlan) -> float:
    """Of all that a stage's layers save."""
    layers = plan.problem.profile.layer_profiles()
    stays = sum(part.saved_bytes(layer) * part.kept for part, layer in zip(plan.layers, layers, strict=True))
    return stays / sum(layer.full_bytes for layer in layers)


def early_stages_keep_less() -> None:
    """Six layers' worth of room: all four of the last stage's fit; the first one's four, twice in flight, do not."""
    world = World.of(Layout(pp=2), "cpu")
    budget = 6 * LAYER
    plan, peak, phases = planned(world, budget)
    stages, trainer = divided(world)
    with closing(managed(stages, trainer, world, device=budget)) as manager:
        rooms = gather_values(manager._engine.tiers[0].budget)
    assert rooms == [HOST * 2 // 3, HOST // 3], "a node's memory is shared as its stages hold microbatches"
    shares = gather_values(kept(plan))
    assert plan.problem.pipeline.held == 2 - world.pp
    assert peak <= budget, (world.pp, peak / LAYER, phases)
    assert plan.stages[0].peak_device_bytes <= budget
    assert shares[1] == 1.0
    assert 0.1 < shares[0] < 1.0, shares
    if world.rank == 0:
        print(f"kept by stage: {shares}", flush=True)


def ranks_of_a_layer_agree() -> None:
    """One rank has less room than the other: both carry out the plan that fits there, and change it at the same steps."""
    world = World.of(Layout(tp=2), "cpu")
    whole = 2 * ROWS * SEQ * HIDDEN * 4 * 16 // 4  # a rank's half of a layer
    plan, peak, phases = planned(world, (5 if world.rank else 7) * whole)
    plans, both = gather_values(plan), gather_values(phases)
    assert plans[0] == plans[1]
    assert both[0] == both[1]
    # Less what a plan leaves free that no step has shown: at most the largest tensor, and what the allocator may not split.
    assert 0 <= 5 * whole - plan.problem.budgets.device_bytes < whole // 2
    assert plan.declined is None
    assert kept(plan) < 1.0
    assert peak <= 5 * whole, (peak / whole, phases)
    if world.rank == 0:
        print(f"agreed after {phases}", flush=True)


def late(schedule: PipelineSchedule, *, told: bool) -> list[int]:
    """In each of two steps, over all ranks: storages that were still away when backward came to their layer."""
    world = World.of(Layout(pp=2, schedule=schedule), "cpu")
    stages, trainer = divided(world)
    counts: list[int] = []
    reached = LayerCalls.reached

    def count(groups: LayerCalls, group: Group) -> None:
        counts[-1] += sum(saved.state is AWAY for saved in group.living())
        reached(groups, group)

    LayerCalls.reached = count  # type: ignore[method-assign]
    try:
        with closing(managed(stages, trainer, world, told=told, alpha=1.0)):
            for step in (1, 2):
                counts.append(0)
                assert trainer.step(step) is not None
    finally:
        LayerCalls.reached = reached  # type: ignore[method-assign]
    return [sum(of_step) for of_step in zip(*gather_values(counts), strict=True)]


def schedules_are_followed_from_the_first_step() -> None:
    for schedule in SCHEDULES:
        guessed, told = late(schedule, told=False), late(schedule, told=True)
        assert told[0] == told[1] == guessed[1] < guessed[0], (schedule, told, guessed)
        # What is let go of between the halves of a split backward may be wanted before another layer has run.
        assert told[0] == 0 or schedule is PipelineSchedule.ZERO_BUBBLE, (schedule, told)
        if dist.get_rank() == 0:
            print(f"{schedule}: reloaded late {told} told, {guessed} guessed", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*whole tensors|the plan for")
    with join(CPU), use_machine(SavedTensorsMachine()):
        early_stages_keep_less()
        ranks_of_a_layer_agree()
        schedules_are_followed_from_the_first_step()


if __name__ == "__main__":
    main()
