"""Runs under torchrun-like environment variables: steps of a sharded or pipelined model with recompute, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from distributed_worker import build
from megatron_layer import MegatronLayer
from small_models import Block, ids, train

import memo

MICROBATCHES = 4
SHARDED = ("fsdp", "fsdp-bf16", "fsdp-inner", "tensor", "sequence")


class Stage(nn.Module):
    """Two blocks of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(32, 2) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(kind: str, scratch: str, alpha: Any) -> list[Any]:
    model = build(kind)
    layers: Any = list(model.layers)  # type: ignore[arg-type]
    manager = None if alpha is None else memo.offload(model, disk=scratch, min_bytes=256, layers=layers, alpha=alpha)
    steps = train(model, lambda step: model(ids(step)), manager)
    flat: list[Any] = []
    for step in steps:
        flat += [step.loss, *(g.to_local() if hasattr(g, "to_local") else g for g in step.gradients)]  # type: ignore[union-attr]
    if manager is not None:
        check(manager)
    return flat


def pipelined(kind: str, scratch: str, alpha: Any) -> list[Any]:
    """Two steps of a schedule; backward runs inside it, so memo does too."""
    rank = dist.get_rank()
    several = kind not in ("GPipe", "1F1B")
    mine = [rank, 3 - rank] if kind in ("ZBVZeroBubble", "DualPipeV") else [rank, rank + 2] if several else [rank]
    count = 4 if several else 2
    torch.manual_seed(0)
    modules = [Stage() for _ in range(count)]
    stages = [PipelineStage(modules[index], index, count, torch.device("cpu")) for index in mine]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target)

    schedule = get_schedule_class(kind)(stages if several else stages[0], MICROBATCHES, loss_fn=loss)  # type: ignore[arg-type]
    model = nn.ModuleList(modules[index] for index in mine)
    layers = [layer for index in mine for layer in modules[index].layers]
    manager = None if alpha is None else memo.offload(model, disk=scratch, min_bytes=256, layers=layers, alpha=alpha)
    generator = torch.Generator().manual_seed(1)
    flat: list[Any] = []
    for _ in range(2):
        x, target = (torch.randn(MICROBATCHES, 48, 32, generator=generator) for _ in range(2))
        losses: list[torch.Tensor] = []
        first = (x,) if 0 in mine else ()
        last = {"target": target, "losses": losses} if count - 1 in mine else {}
        if manager is None:
            schedule.step(*first, **last)
        else:
            with manager:
                schedule.step(*first, **last)
        flat += [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        flat += losses
        model.zero_grad()
    if manager is not None:
        gc.collect()
        check(manager)
    return flat


def megatron(kind: str, scratch: str, alpha: Any) -> list[Any]:
    """Two steps of layers that torch.distributed alone divides; at least 0.4 of all is recomputed."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(MegatronLayer() for _ in range(3)))
    generator = torch.Generator().manual_seed(0)
    for parameter in (parameter for name, parameter in model.named_parameters() if "norm" in name):
        parameter.data = torch.randn(parameter.shape, generator=generator)
    manager = (
        None if alpha is None else memo.offload(model, disk=scratch, min_bytes=256, layers=list(model), alpha=alpha)
    )
    flat: list[Any] = []
    for _ in range(2):
        x = torch.randn(48, 2, 32, generator=generator).requires_grad_()
        with manager or contextlib.nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        flat += [loss.detach(), x.grad]
        for parameter in model.parameters():
            flat.append(parameter.main_grad.clone() if hasattr(parameter, "main_grad") else parameter.grad)
            parameter.grad = None
    if manager is not None:
        check(manager)
        if alpha == 0.0:
            assert manager.stats.bytes_disk <= 1.5 * manager.stats.bytes_recomputed, manager.stats
    return flat


class _Summed(torch.autograd.Function):
    """Sum over the ranks, whose backward is that of a sum of equal parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Talking(nn.Module):
    """A layer whose ranks sum what they compute, as tensor parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.down(self.up(self.norm(x)).tanh())
        return x + torch.tanh(_Summed.apply(inner))  # type: ignore[no-untyped-call]


def unequal_room(kind: str, scratch: str, alpha: Any) -> list[Any]:
    """The second rank has no device memory to try a recompute beside what is saved; then no tier has room on either."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Talking() for _ in range(3))
    options: dict[str, Any] = {"on_full": "recompute", "disk": scratch, "disk_budget": "5MiB", "min_bytes": 1}
    if dist.get_rank() == 1:
        options["device"] = "1MiB"
    manager = None if alpha is None else memo.offload(layers, layers=[*layers], alpha=alpha, **options)
    losses = []
    for _ in range(2):
        x = torch.randn(2048, 64)
        with manager or contextlib.nullcontext():
            for layer in layers:
                x = layer(x)
        x.square().mean().backward()
        losses.append(x.detach())
    if manager is not None:
        manager.close()
    return [*losses, *(parameter.grad for parameter in layers.parameters())]


def check(manager: memo.Manager) -> None:
    use = manager.report().recompute
    assert use is not None
    assert use.refused == {}, use
    assert manager.stats.bytes_recomputed > 0, use
    assert use.accepted == len(manager.layers), use
    assert manager.stats.live_entries == 0, manager.stats
    manager.close()


def compare(kind: str, scratch: str) -> None:
    """Without memo and with it, at several fractions; says that all are equal, or raises."""
    special = {"megatron": megatron, "unequal-room": unequal_room}
    run = special.get(kind, sharded if kind in SHARDED else pipelined)
    want = run(kind, scratch, None)
    for alpha in (0.0, 0.5, (0.25, 0.5, 0.25)):
        got = run(kind, scratch, alpha)
        assert len(got) == len(want)
        for position, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), f"{kind}, alpha {alpha}: tensor {position} differs"
    if dist.get_rank() == 0:
        print(f"equal {kind}", flush=True)


def main(scratch: str, *kinds: str) -> None:
    """One after the other, up to the first that fails."""
    warnings.filterwarnings("ignore", message=".*whole tensors")
    dist.init_process_group("gloo")
    for kind in kinds:
        compare(kind, scratch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
