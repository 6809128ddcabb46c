"""Runs on two ranks: a step whose gradient is not finite on one of them is skipped, and leaves no trace."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from memo.compression import GradientCompression
from memo.gpt import TrainConfig, preset
from memo.gpt.model.build_rank import build_stages
from memo.gpt.optim import LossGuardConfig, LrSchedule, OnNan
from memo.gpt.train import ParallelTrainer
from memo.gpt.train.step import StepResult
from memo.parallel import Layout, World, join

CPU = torch.device("cpu")
SEQ, ROWS = 16, 4


class Drawn:
    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(61, (ROWS, SEQ + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trainer_of(method: str, world: World) -> ParallelTrainer:
    sizes = {"vocab_size": 61, "max_seq": SEQ, "layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "kv_heads": 4}
    stages = build_stages(
        preset("tiny", variant="llama", **sizes), world, seq=SEQ, device=CPU, dtype=torch.float32, seed=7
    )
    config = TrainConfig(
        schedule=LrSchedule(peak=1e-3, floor=1e-4, warmup=0, steps=10), loss_guard=LossGuardConfig(on_nan=OnNan.SKIP)
    )
    compression = GradientCompression.parse(method)
    return ParallelTrainer(stages, world, Drawn(), config, device=CPU, rows=ROWS, compression=compression)


def stepped(trainer: ParallelTrainer, step: int, *, poisoned: bool = False) -> StepResult:
    """The step, in which a gradient of the first layer is NaN on the second rank."""
    layer: Any = trainer.stages[0].layers["0"]
    handle = None
    if poisoned and dist.get_rank() == 1:
        handle = layer.register_full_backward_pre_hook(lambda _, grads: (grads[0] * torch.nan, *grads[1:]))
    result = trainer.step(step)
    if handle is not None:
        handle.remove()
    assert result is not None
    return result


def check(method: str, world: World) -> None:
    plain, other = trainer_of(method, world), trainer_of(method, world)
    for step in (1, 2):
        assert stepped(plain, step).loss == stepped(other, step).loss
    for name, tensor in plain.compressed.state().items():  # type: ignore[union-attr]
        assert tensor.any(), f"{name}: steps that are applied leave something"
    bad = stepped(other, 3, poisoned=True)
    assert bad.skipped
    assert bad.alarm == "the gradient norm is nan", bad.alarm
    one, two = stepped(plain, 4), stepped(other, 4)
    assert (one.loss, one.grad_norm) == (two.loss, two.grad_norm)
    for name, tensor in plain.compressed.state().items():  # type: ignore[union-attr]
        assert torch.equal(tensor, other.compressed.state()[name]), name  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        print(f"{method}: as if it had not been", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with join(CPU):
        world = World.of(Layout(dp=2), "cpu")
        for method in ("int8", "powersgd:2"):
            check(method, world)
            dist.barrier()


if __name__ == "__main__":
    sys.exit(main())
