"""Runs on some ranks: steps of a pipeline whose stages pass on float32, and of one that passes on bfloat16."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from memo.gpt import TrainConfig, preset
from memo.gpt.model.build_rank import build_stages
from memo.gpt.optim import LrSchedule
from memo.gpt.train import ParallelTrainer
from memo.parallel import Layout, PipelineSchedule, World, join

CPU = torch.device("cpu")
SEQ, ROWS, HIDDEN, MICROBATCHES = 32, 2, 64, 8
# In nats a token, as declared in benchmarks/gradient_loss.py.
MARGIN = 0.02


class Drawn:
    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(61, (ROWS, SEQ + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run(schedule: str, dtype: torch.dtype, *, poisoned: bool = False) -> tuple[list[float], float, float, int]:
    """Losses of two steps, the norm of the last, an evaluation's loss, and bytes that this rank sent in both."""
    layout = Layout(pp=dist.get_world_size(), schedule=PipelineSchedule(schedule))
    sizes = {"vocab_size": 61, "max_seq": SEQ, "layers": 8, "hidden": HIDDEN, "heads": 4, "ffn": 128, "kv_heads": 4}
    shape, world = preset("tiny", variant="llama", **sizes), World.of(layout, "cpu")
    stages = build_stages(shape, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=7)
    for stage in stages:
        stage.passed_dtype = dtype
        if poisoned and stage.is_first:
            with torch.no_grad():
                next(stage.parameters())[0, 0] = torch.inf
    numbers = LrSchedule(peak=1e-3, floor=1e-4, warmup=0, steps=10)
    config = TrainConfig(schedule=numbers, accumulate=MICROBATCHES, eval_steps=2)
    trainer = ParallelTrainer(stages, world, Drawn(), config, device=CPU, rows=ROWS)
    if poisoned:
        mean, _ = trainer._gradients(1, lambda: False) or (0.0, 0)
        return [mean], 0.0, 0.0, 0
    sent: list[int] = []
    original: Any = dist.P2POp

    def counting(kind: Any, tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if kind is dist.isend and tensor.is_floating_point():
            sent.append(tensor.nbytes)
        return original(kind, tensor, *rest, **options)

    dist.P2POp = counting  # type: ignore[assignment,misc]
    results = [trainer.step(step) for step in (1, 2)]
    dist.P2POp = original  # type: ignore[misc]
    losses = [result.loss for result in results if result is not None]
    assert results[-1] is not None
    return losses, results[-1].grad_norm, trainer.evaluate(Drawn()), sum(sent)


def check(schedule: str) -> None:
    losses, norm, evaluated, nbytes = run(schedule, torch.float32)
    rounded, its_norm, its_evaluated, its_nbytes = run(schedule, torch.bfloat16)
    assert nbytes == 2 * its_nbytes > 0, (nbytes, its_nbytes)
    message = ROWS * SEQ * HIDDEN * 4
    assert nbytes % (2 * MICROBATCHES * message) == 0, (nbytes, message, nbytes / message)
    assert losses != rounded
    for one, other in zip([*losses, evaluated], [*rounded, its_evaluated], strict=True):
        assert abs(one - other) <= MARGIN, (losses, rounded)
    assert abs(its_norm / norm - 1) < 2**-6, (norm, its_norm)
    assert not torch.isfinite(torch.tensor(run(schedule, torch.bfloat16, poisoned=True)[0])).any()
    if dist.get_rank() == 0:
        print(f"{schedule}: half of the bytes", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with join(CPU):
        for schedule in sys.argv[1:]:
            check(schedule)
            dist.barrier()


if __name__ == "__main__":
    sys.exit(main())
