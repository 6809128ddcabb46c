"""Runs under torchrun: steps of a divided GPT against one process, and with memo against without, bit for bit."""

from __future__ import annotations

import argparse
import gc
import tempfile
import warnings
from contextlib import closing, nullcontext

import torch
import torch.distributed as dist

import memo
from memo.gpt.config import GPTConfig, preset
from memo.gpt.model import GPT
from memo.gpt.parallel_model import build_stages
from memo.gpt.parallel_training import ParallelTrainer
from memo.gpt.schedule import Schedule
from memo.gpt.train_config import TrainConfig
from memo.gpt.training import Trainer
from memo.parallel.layout import Layout, PipelineSchedule
from memo.parallel.world import World, join

SEQ, ROWS, STEPS, SEED = 64, 4, 3, 7
CPU = torch.device("cpu")

# float32 sums of a few thousand terms in another order: some 2^-24 * sqrt(4096) of the largest partial sum.
BOUND = 2e-5

Step = tuple[float, float, dict[str, torch.Tensor]]


class Drawn:
    """Random tokens as a function of (step, microbatch)."""

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(61, (ROWS, SEQ + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def training(microbatches: int) -> TrainConfig:
    return TrainConfig(schedule=Schedule(peak=1e-3, floor=1e-4, warmup=0, steps=10), accumulate=microbatches, clip=0.5)


def steps(trainer: Trainer) -> list[Step]:
    """Loss, norm and the gradients as the optimizer sees them, whole."""
    seen: dict[str, torch.Tensor] = {}
    named = trainer.named_parameters if isinstance(trainer, ParallelTrainer) else trainer.model.named_parameters

    def note(*_: object) -> None:
        for name, parameter in named():
            grad = parameter.grad
            assert grad is not None, name
            seen[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()

    trainer.optimizer.register_step_pre_hook(note)
    done = []
    for step in range(1, STEPS + 1):
        result = trainer.step(step)
        assert result is not None
        done.append((result.loss, result.grad_norm, dict(seen)))
    return done


def alone(shape: GPTConfig, microbatches: int) -> list[Step]:
    model = GPT(shape, device="meta").to_empty(device="cpu")
    from memo.gpt.initial import initialise

    initialise(model, shape, SEED)
    return steps(Trainer(model, Drawn(), training(microbatches), device=CPU))


def divided(shape: GPTConfig, world: World, microbatches: int, alpha: float | None) -> list[Step]:
    stages = build_stages(shape, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=SEED)
    managed: memo.Manager | None = None
    with tempfile.TemporaryDirectory() as scratch:
        if alpha is not None:
            layers = [layer for stage in stages for layer in stage.layers.values()]
            model = torch.nn.ModuleList(stages)
            managed = memo.offload(model, host="8MiB", disk=scratch, min_bytes=256, layers=layers, alpha=alpha)
        with closing(managed) if managed is not None else nullcontext():
            trainer = ParallelTrainer(
                stages, world, Drawn(), training(microbatches), device=CPU, rows=ROWS, around_forward=managed
            )
            done = steps(trainer)
            if managed is not None:
                gc.collect()
                assert managed.stats.live_entries == 0, managed.stats
                assert managed.stats.bytes_host > 0
                if world.rank == 0 and alpha < 1:
                    print("tokenwise", managed.report().tokenwise)
    return done


def compare(got: list[Step], want: list[Step]) -> float:
    """The largest difference, in units of the largest entry of each tensor."""
    worst = 0.0
    for (loss, norm, grads), (loss0, norm0, grads0) in zip(got, want, strict=True):
        worst = max(worst, abs(loss / loss0 - 1), abs(norm / norm0 - 1))
        for name, grad in grads.items():
            worst = max(worst, float((grad - grads0[name]).abs().max() / grads0[name].abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("dp", "tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--schedule", type=PipelineSchedule, default=PipelineSchedule.ONE_F_ONE_B)
    parser.add_argument("--no-sequence", action="store_true")
    parser.add_argument("--variant", default="gpt")
    parser.add_argument("--alpha", type=float, nargs="*", default=[1.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*whole tensors")
    layout = Layout(
        dp=args.dp, tp=args.tp, pp=args.pp, cp=args.cp, schedule=args.schedule, sequence_parallel=not args.no_sequence
    )
    microbatches = 4 if layout.pp > 1 else 2
    shape = preset(
        "tiny", variant=args.variant, vocab_size=61, max_seq=SEQ, layers=4, hidden=32, heads=4, ffn=64, kv_heads=4
    )
    layout.check(shape, seq=SEQ, batch=ROWS, microbatches=microbatches)
    layout.check_ranks(int(__import__("os").environ["WORLD_SIZE"]))
    want = alone(shape, microbatches)
    with join(CPU):
        world = World.of(layout, "cpu")
        plain = divided(shape, world, microbatches, None)
        worst = compare(plain, want)
        assert worst <= BOUND, f"rank {world.rank}: {worst:.3g}"
        for alpha in args.alpha:
            got = divided(shape, world, microbatches, alpha)
            for (loss, norm, grads), (loss0, norm0, grads0) in zip(got, plain, strict=True):
                assert (loss, norm) == (loss0, norm0)
                assert all(torch.equal(grads[name], grads0[name]) for name in grads0)
        dist.barrier()
        if world.rank == 0:
            print(f"equal within {worst:.3g}; with memo bit for bit, alpha {args.alpha}")


if __name__ == "__main__":
    main()
