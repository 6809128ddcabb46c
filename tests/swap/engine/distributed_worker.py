"""Runs under torchrun-like environment variables: steps of a sharded model with and without memo, compared bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from small_models import ids, train

import memo


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build(kind: str) -> torch.nn.Module:
    from small_models import stack

    # A group of its own for each, as init_device_mesh makes where there is a GPU: torch takes equal meshes for one another.
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    if kind.startswith("fsdp"):
        model = stack()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "fsdp-bf16" else MixedPrecisionPolicy()
        for layer in model.layers:
            for name in ("qkv", "up", "down") if kind == "fsdp-inner" else ():  # gathered and freed within the layer
                fully_shard(layer.get_submodule(name), mesh=mesh, mp_policy=policy)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    model = stack(make=MLP)
    for layer in model.layers:
        if kind == "tensor":
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        else:
            gathered = ColwiseParallel(input_layouts=Shard(1))
            shard = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
            parallelize_module(layer, mesh, {"norm": SequenceParallel(), "up": gathered, "down": shard})
            layer.register_forward_hook(lambda _module, _args, output: output.full_tensor())
            whole = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False
            )
            parallelize_module(layer, mesh, whole)
    return model


def run(kind: str, scratch: str, *, managed: bool) -> tuple[list[object], int]:
    model = build(kind)
    manager = (
        memo.offload(model, alpha=1.0, disk=scratch, min_bytes=256, layers=list(model.layers)) if managed else None
    )
    steps = train(model, lambda step: model(ids(step)), manager)
    flat = []
    for step in steps:
        flat.append(step.loss)
        flat += [g.to_local() if hasattr(g, "to_local") else g for g in step.gradients if g is not None]
    moved = 0
    if manager is not None:
        moved = manager.stats.bytes_disk
        assert manager.stats.live_entries == 0, manager.stats
        manager.close()
    return flat, moved


def shares(scratch: str) -> None:
    """Two ranks of one node were given one budget, and one of them a smaller one."""
    from small_models import stack

    budget = "64KiB" if dist.get_rank() == 0 else "1MiB"
    model = stack()
    manager = memo.offload(model, alpha=1.0, host=budget, disk=scratch, disk_budget="2MiB", min_bytes=256)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    host, disk = manager.report().tiers[1:]
    assert host.budget_bytes == 32 << 10, host
    assert disk.budget_bytes == 1 << 20, disk
    assert host.peak_bytes <= 32 << 10
    manager.close()


def compare(kind: str, scratch: str) -> None:
    """Without memo and with it; raises where they differ."""
    want, _ = run(kind, scratch, managed=False)
    got, moved = run(kind, scratch, managed=True)
    assert moved > 0
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), kind
    dist.barrier()


def main(scratch: str, *kinds: str) -> None:
    """One after the other, up to the first that fails."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in kinds:
        if kind == "shares":
            shares(scratch)
        else:
            compare(kind, scratch)
        if dist.get_rank() == 0:
            print(f"equal {kind}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
