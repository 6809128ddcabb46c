"""Runs under torchrun on eight ranks: plans carried out, against one process and against the plans' own collectives."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from equality_worker import BOUND, CPU, LOSS_ROUNDING, ROWS, SEED, SEQ, Drawn, training

import memo
from memo.dry_run.agreement import against_plan
from memo.dry_run.all_ranks import recomputed
from memo.dry_run.places import Place
from memo.dry_run.recorded_collectives import IssuedCollectives
from memo.gpt import Precision, preset
from memo.gpt.arithmetic import PlannedRun, derive_profile
from memo.gpt.model import GPT
from memo.gpt.model.build_rank import build_stages
from memo.gpt.model.init_weights import initialise
from memo.gpt.train import ParallelTrainer
from memo.gpt.train.step import Trainer
from memo.mip.activation import ActivationPlan, ActivationProblem, Budgets, DoesNotFit, Pipeline, solve_problem
from memo.mip.inputs import hardware_preset
from memo.parallel import Layout, World, join

STEPS = 3
LAYOUTS = {
    "tp2_pp2_dp2": Layout(tp=2, pp=2, dp=2),
    "cp2_tp2_dp2": Layout(cp=2, tp=2, dp=2),
    "pp4_tp2": Layout(pp=4, tp=2),
}
SHAPE = preset("tiny", vocab_size=61, max_seq=SEQ, layers=8, hidden=32, heads=4, ffn=128, kv_heads=4)


def tight_plan(run: PlannedRun) -> ActivationPlan:
    """A plan that moves or recomputes: the one with the smallest budget, of a few, that fits."""
    profile = derive_profile(
        run.config, hardware_preset("h100"), run.planned_layout, precision=run.precision, accumulate=run.microbatches
    )
    pipeline = Pipeline(
        stages=run.layout.pp, microbatches=run.microbatches, stage_ranks=run.layout.ranks // run.layout.pp
    )

    def solved(device: int) -> ActivationPlan:
        budgets = Budgets(device_bytes=device, host_bytes=64 << 20, ranks_per_node=run.layout.ranks)
        hardware = hardware_preset("h100")
        return solve_problem(ActivationProblem(profile=profile, hardware=hardware, budgets=budgets, pipeline=pipeline))

    plan = solved(1 << 33)
    highest = max(stage.peak_device_bytes for stage in plan.stages)
    for percent in range(98, 40, -2):
        try:
            plan = solved(highest * percent // 100)
        except DoesNotFit:
            break
    assert any(layer.recomputes or layer.host for layer in plan.layers)
    return plan


def alone(microbatches: int) -> list[float]:
    model = GPT(SHAPE, device="meta").to_empty(device="cpu")
    initialise(model, SHAPE, SEED)
    return losses(Trainer(model, Drawn(), training(microbatches), device=CPU))


def losses(trainer: Trainer) -> list[float]:
    found = []
    for step in range(1, STEPS + 1):
        result = trainer.step(step)
        assert result is not None
        found.append(result.loss)
    return found


def check(name: str) -> str:
    layout = LAYOUTS[name]
    run = PlannedRun(
        config=SHAPE,
        precision=Precision.FP32,
        layout=layout,
        tokens=SEQ,
        rows=ROWS,
        microbatches=4 if layout.pp > 1 else 2,
    )
    run.check()
    plan = tight_plan(run)
    world = World.of(layout, "cpu")
    stages = build_stages(SHAPE, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=SEED)
    trainer = ParallelTrainer(stages, world, Drawn(), training(run.microbatches), device=CPU, rows=ROWS)
    manager = memo.offload(
        nn.ModuleList(stages),
        plan=plan,
        host="64MiB",
        min_bytes=256,
        layers=[layer for stage in stages for layer in stage.layers.values()],
        group=world.layer_ranks.get_group(),
        schedule=trainer.schedule,
    )
    with closing(manager):
        trainer.around_forward = manager
        got = losses(trainer)
        with IssuedCollectives() as issued:
            trainer.step(STEPS + 1)
        moved = torch.tensor(manager.stats.bytes_host + manager.stats.bytes_recomputed)
    want = alone(run.microbatches)
    worst = max(abs(one / other - 1) - LOSS_ROUNDING for one, other in zip(got, want, strict=True))
    assert worst <= BOUND[torch.float32], f"{name}: {got}, and one process {want}"
    place = Place.of(layout, world.rank)
    again = recomputed(dataclasses.replace(run, plan=plan), place.pp)
    # Two numbers a group of a layer's ranks compare once a step, whether all repeat the same; a simulated rank has no peers.
    calls = [call for call in issued.calls if (call.nbytes, call.dtype) != (16, "int64")]
    wrong = against_plan(
        place, calls, run.collectives_of(stage=place.pp, tp_rank=place.tp, replica=place.replica), again
    )
    assert not wrong, f"{name}: {wrong}"
    dist.all_reduce(moved)
    assert moved > 0, f"{name}: nothing was moved or recomputed"
    return f"carried out {name}: {len(issued.calls)} collectives as planned, losses within {worst:.2g}"


def main() -> None:
    """Arguments: names of layouts."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*whole tensors")
    warnings.filterwarnings("ignore", category=FutureWarning)
    with join(CPU):
        for name in sys.argv[1:]:
            told = check(name)
            dist.barrier()
            if dist.get_rank() == 0:
                print(told, flush=True)


if __name__ == "__main__":
    main()
