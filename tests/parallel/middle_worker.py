"""Runs under torchrun: what level MATMULS of a divided layer moves, to the byte, and which collectives it repeats: none
of tensor parallelism.

Says `middle <layout>` for each.
"""

from __future__ import annotations

import collections
import sys
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from equality_worker import CPU, ROWS, SEQ, Drawn, layout_of, training
from torch.utils._python_dispatch import TorchDispatchMode

import memo
from memo.gpt.block import Block, ElementSizes
from memo.gpt.config import GPTConfig, preset
from memo.gpt.parallel_model import build_stages
from memo.gpt.parallel_training import ParallelTrainer
from memo.gpt.train_config import Precision
from memo.parallel.layout import Layout
from memo.parallel.world import World, join
from memo.swap.levels import Level

LAYERS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "max_seq": SEQ,
    "layers": LAYERS,
    "hidden": 32,
    "heads": 4,
    "ffn": 64,
    "kv_heads": 4,
}

Counts = collections.Counter[str]


class Collectives(TorchDispatchMode):
    """Counts what moves activations between ranks; what memo asks the others is of whole numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for value in args for t in (value if isinstance(value, list) else [value])]
            if any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors):
                self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def measured(
    shape: GPTConfig, layout: Layout, precision: Precision, alpha: Any
) -> tuple[Counts, list[memo.swap.levels.LayerCosts]]:
    """The collectives of a second step, which tries nothing out, and what each layer's levels cost."""
    world = World.of(layout, "cpu")
    autocast = torch.bfloat16 if precision is Precision.BF16_AUTOCAST else None
    stages = build_stages(shape, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=7, autocast=autocast)
    layers = [layer for stage in stages for layer in stage.layers.values()]
    model = torch.nn.ModuleList(stages)
    with closing(memo.offload(model, alpha=alpha, host="8MiB", min_bytes=1, layers=layers)) as manager:
        trainer = ParallelTrainer(
            stages, world, Drawn(), training(1), device=CPU, rows=ROWS, around_forward=manager
        )
        assert trainer.step(1) is not None
        with Collectives() as collectives:
            assert trainer.step(2) is not None
        use = manager.report().tokenwise
        assert use is None or use.refused == {}, use
        assert alpha == 1.0 or manager.stats.bytes_recomputed > 0
        return collectives.counts, manager.levels_profile()


def check(name: str) -> None:
    precision = Precision.BF16_AUTOCAST if name.endswith("_autocast") else Precision.FP32
    layout, model, _ = layout_of(name.removesuffix("_autocast"))
    shape = preset("tiny", **(SHAPE | model))
    plain, _ = measured(shape, layout, precision, 1.0)
    for alpha in [(0, 1, 0), (0.25, 0.5, 0.25), (0, 0, 1)]:
        counts, costs = measured(shape, layout, precision, alpha)
        print(name, alpha, counts - plain, flush=True)
        block = Block.of(shape, SEQ, ElementSizes.of(precision), batch=ROWS, tp=layout.tp, cp=layout.cp)
        for cost in costs:
            print(cost.bytes_per_token[Level.MATMULS] / ROWS, block.matmuls, cost.bytes_per_token[Level.ALL]/ROWS, block.all, flush=True)


def main() -> None:
    """Arguments: names of layouts."""
    torch.set_num_threads(1)
    with join(CPU):
        for name in sys.argv[1:]:
            check(name)
            if dist.get_rank() == 0:
                print(f"middle {name}", flush=True)


if __name__ == "__main__":
    main()
