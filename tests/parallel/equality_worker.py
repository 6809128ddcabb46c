"""Runs under torchrun: steps of a divided GPT against one process, and with memo against without, bit for bit."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import warnings
from contextlib import closing, nullcontext
from typing import Any

import torch
import torch.distributed as dist

import memo
from memo.gpt import AttentionPattern, GPTConfig, MoeConfig, TrainConfig, preset
from memo.gpt.model import GPT
from memo.gpt.model.build_rank import build_stages
from memo.gpt.model.init_weights import initialise
from memo.gpt.optim import LrSchedule
from memo.gpt.train import ParallelTrainer
from memo.gpt.train.step import Trainer
from memo.parallel import ContextAttention, Layout, PipelineSchedule, World, join

SEQ, ROWS, STEPS, SEED = 64, 4, 3, 7
CPU = torch.device("cpu")
DEVICE = torch.device(os.environ.get("EQUALITY_DEVICE", CPU))
"""Of every rank: on "cuda:0" they share one GPU, and gloo copies what it sends through host memory."""

# float32 sums of a few thousand terms in another order: some 2^-24 * sqrt(4096) of the largest partial sum. AdamW divides by
# an entry's own size, so what is off in an entry near its epsilon is magnified; where the data has such an entry, float64
# shows the same with 2^29 times less of it, of which the bound takes back some.
BOUND = {torch.float32: 4e-5, torch.float64: 1e-11}
# A step's loss is given as float32.
LOSS_ROUNDING = 2.0**-23

Step = tuple[float, float, dict[str, torch.Tensor]]


class Drawn:
    """Random tokens as a function of (step, microbatch)."""

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(61, (ROWS, SEQ + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def training(microbatches: int) -> TrainConfig:
    return TrainConfig(
        schedule=LrSchedule(peak=1e-3, floor=1e-4, warmup=0, steps=10), accumulate=microbatches, clip=0.5, eval_steps=3
    )


def steps(trainer: Trainer) -> list[Step]:
    """Loss, norm and the gradients as the optimizer sees them, whole; after each step the loss of an evaluation."""
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
        done.append((trainer.evaluate(Drawn()), 1.0, {}))
    return done


def alone(shape: GPTConfig, microbatches: int, dtype: torch.dtype) -> list[Step]:
    model = GPT(shape, device="meta", dtype=dtype).to_empty(device=DEVICE)
    initialise(model, shape, SEED)
    return steps(Trainer(model, Drawn(), training(microbatches), device=DEVICE))


def divided(
    shape: GPTConfig, world: World, microbatches: int, dtype: torch.dtype, alpha: float | None = None
) -> list[Step]:
    stages = build_stages(shape, world, seq=SEQ, device=DEVICE, dtype=dtype, seed=SEED)
    managed: memo.Manager | None = None
    with tempfile.TemporaryDirectory() as scratch:
        if alpha is not None:
            layers = [layer for stage in stages for layer in stage.layers.values()]
            model = torch.nn.ModuleList(stages)
            managed = memo.offload(model, host="8MiB", disk=scratch, min_bytes=256, layers=layers, alpha=alpha)
        with closing(managed) if managed is not None else nullcontext():
            trainer = ParallelTrainer(
                stages, world, Drawn(), training(microbatches), device=DEVICE, rows=ROWS, around_forward=managed
            )
            done = steps(trainer)
            if managed is not None:
                gc.collect()
                assert managed.stats.live_entries == 0, managed.stats
                moved = torch.tensor(managed.stats.bytes_host)
                dist.all_reduce(moved)  # a last stage of one layer has nothing that is worth moving
                assert moved > 0
    return done


def compare(got: list[Step], want: list[Step]) -> float:
    """The largest difference, in units of the largest entry of each tensor."""
    worst = 0.0
    for (loss, norm, grads), (loss0, norm0, grads0) in zip(got, want, strict=True):
        worst = max(worst, abs(loss / loss0 - 1) - LOSS_ROUNDING, abs(norm / norm0 - 1))
        for name, grad in grads.items():
            worst = max(worst, float((grad - grads0[name]).abs().max() / grads0[name].abs().max()))
    return worst


def layout_of(name: str) -> tuple[Layout, dict[str, Any], torch.dtype]:
    """`dp2_tp2`, `pp2_zbv`, `tp2_replicated`, `cp2_llama_documents_float64`: the layout, and what is not as usual."""
    values: dict[str, Any] = {}
    model: dict[str, Any] = {}
    dtype = torch.float32
    for part in name.split("_"):
        if part in tuple(PipelineSchedule):
            values["schedule"] = PipelineSchedule(part)
        elif part == "replicated":
            values["sequence_parallel"] = False
        elif part == "overlap":
            values["tp_overlap"] = True
        elif part == "llama":
            model["variant"] = part
        elif part == "documents":
            model["end_of_document"] = 5  # one token of 61
        elif part == "local":
            model["pattern"] = AttentionPattern(window=SEQ // 5, full_every=2)
        elif part == "ring":
            values["cp_attention"] = ContextAttention.RING
        elif part == "grouped":
            model["kv_heads"] = 2
        elif part == "shared":
            model["kv_heads"] = 1
        elif part == "astride":  # some ranks' queries are of two key/value heads, not equally many of each
            model |= {"heads": 6, "kv_heads": 3, "hidden": 48}
        elif part == "tiles":
            model |= {"mlp_tiles": 2, "ffn": 512}  # of tokens and of columns: a tile has 128 at least
        elif part == "moe":
            model["moe"] = MoeConfig(experts=4, top_k=2, shared_experts=1, expert_hidden=16, every=2)
        elif part == "dcca":
            model["moe"] = MoeConfig(experts=4, top_k=2, expert_hidden=48, bottleneck=8, every=2)
        elif part == "float64":
            dtype = torch.float64
        else:
            values[part[:2]] = int(part[2:])
    return Layout(**values), model, dtype


def check(name: str, alphas: list[float]) -> str:
    layout, model, dtype = layout_of(name)
    microbatches = 4 if layout.pp > 1 else 2
    sizes = {"vocab_size": 61, "max_seq": SEQ, "layers": 4, "hidden": 32, "heads": 4, "ffn": 64, "kv_heads": 4}
    shape = preset("tiny", **(sizes | model))
    layout.check(shape, seq=SEQ, batch=ROWS, microbatches=microbatches)
    layout.check_ranks(dist.get_world_size())
    world = World.of(layout, DEVICE.type)
    plain = divided(shape, world, microbatches, dtype)
    worst, bound = compare(plain, alone(shape, microbatches, dtype)), BOUND[dtype]
    assert worst <= bound, f"{name}: {worst:.3g} off one process, more than {bound}"
    for alpha in alphas:
        got = divided(shape, world, microbatches, dtype, alpha)
        for (loss, norm, grads), (loss0, norm0, grads0) in zip(got, plain, strict=True):
            assert (loss, norm) == (loss0, norm0), f"{name}, alpha {alpha}: {loss} {norm}, not {loss0} {norm0}"
            for parameter in grads0:
                assert torch.equal(grads[parameter], grads0[parameter]), f"{name}, alpha {alpha}: {parameter}"
    return f"equal {name} within {worst:.2g} of one process, and bit for bit with memo"


def main() -> None:
    """Arguments: alphas separated by commas, then names of layouts."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*whole tensors")
    warnings.filterwarnings("ignore", category=FutureWarning)
    if DEVICE.type == "cuda":
        torch.use_deterministic_algorithms(True)
        torch.cuda.init()  # otherwise DeviceMesh gives each rank a GPU of its own
    with join(CPU):
        for name in sys.argv[2:]:
            told = check(name, [float(alpha) for alpha in sys.argv[1].split(",")])
            dist.barrier()
            if dist.get_rank() == 0:
                print(told, flush=True)


if __name__ == "__main__":
    main()
