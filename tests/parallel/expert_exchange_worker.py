"""Runs under torchrun: bytes of activations that expert-parallel ranks exchange in a step, with and without a bottleneck.

Says `exchanged <hidden> <bottleneck> <bytes>`: over all ranks, in one step.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from equality_worker import CPU, ROWS, SEQ, Drawn, training
from torch.utils._python_dispatch import TorchDispatchMode

from memo.gpt import MoeConfig, preset
from memo.gpt.model.build_rank import build_stages
from memo.gpt.train import ParallelTrainer
from memo.parallel import Layout, World, join

HIDDEN = 32


class Exchanged(TorchDispatchMode):
    """Adds up what this rank gives to exchanges of floating-point rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ == "alltoall_base_":
            given = args[1]
            self.nbytes += given.numel() * given.element_size() if given.is_floating_point() else 0
        return func(*args, **(kwargs or {}))


def exchanged(bottleneck: int) -> int:
    """Bytes of all ranks in a step."""
    moe = MoeConfig(experts=4, top_k=2, expert_hidden=16, bottleneck=bottleneck, every=2)
    sizes = {"vocab_size": 61, "max_seq": SEQ, "layers": 4, "hidden": HIDDEN, "heads": 4}
    world = World.of(Layout(dp=2, ep=2), "cpu")
    stages = build_stages(preset("tiny", **sizes, moe=moe), world, seq=SEQ, device=CPU, dtype=torch.float32, seed=7)
    trainer = ParallelTrainer(stages, world, Drawn(), training(1), device=CPU, rows=ROWS)
    with Exchanged() as seen:
        assert trainer.step(1) is not None
    total = torch.tensor(seen.nbytes)
    dist.all_reduce(total)
    return int(total)


def main() -> None:
    """Arguments: bottlenecks."""
    torch.set_num_threads(1)
    with join(CPU):
        for bottleneck in map(int, sys.argv[1:]):
            nbytes = exchanged(bottleneck)
            if dist.get_rank() == 0:
                print(f"exchanged {HIDDEN} {bottleneck} {nbytes}", flush=True)


if __name__ == "__main__":
    main()
