"""Runs under torchrun: what level SAVE_MATMULS of a divided layer moves, and which collectives it repeats: at most
what derived plans count: none of tensor parallelism, and some exchanges around attention.

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
from memo.gpt import GPTConfig, Precision, preset
from memo.gpt.arithmetic.block_bytes import BlockFigures, ElementSizes
from memo.gpt.model.build_rank import build_stages
from memo.gpt.train import ParallelTrainer
from memo.parallel import Layout, World, join
from memo.swap import Level
from memo.swap.tensor_kinds import tensors_within

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

OVERLAPPED = {
    "all_gather_into_tensor": "_allgather_base_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "all_reduce": "allreduce_",
}
"""Collectives that are launched and waited for by two operators."""
Counts = collections.Counter[str]


class Collectives(TorchDispatchMode):
    """Counts what moves activations between ranks; what memo asks the others is of whole numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moves = func.namespace in ("c10d", "_c10d_functional")
        name = func.overloadpacket.__name__
        if moves and name != "wait_tensor" and any(tensor.is_floating_point() for tensor in tensors_within(args)):
            self.counts[OVERLAPPED.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def measured(shape: GPTConfig, layout: Layout, precision: Precision, alpha: Any) -> tuple[Counts, list[float]]:
    """The collectives of a second step, which tries nothing out, and the bytes a token of level SAVE_MATMULS."""
    world = World.of(layout, "cpu")
    autocast = torch.bfloat16 if precision is Precision.BF16_AUTOCAST else None
    stages = build_stages(shape, world, seq=SEQ, device=CPU, dtype=torch.float32, seed=7, autocast=autocast)
    layers = [layer for stage in stages for layer in stage.layers.values()]
    model = torch.nn.ModuleList(stages)
    with closing(memo.offload(model, alpha=alpha, host="8MiB", min_bytes=1, layers=layers)) as manager:
        trainer = ParallelTrainer(stages, world, Drawn(), training(1), device=CPU, rows=ROWS, around_forward=manager)
        assert trainer.step(1) is not None
        with Collectives() as collectives:
            assert trainer.step(2) is not None
        use = manager.report().recompute
        assert use is None or use.refused == {}, use
        assert alpha == 1.0 or manager.stats.bytes_recomputed > 0
        policy = manager._recompute_policy
        assert policy is not None
        middle, least = (
            [sum(policy.moved_nbytes(layer.name, level)) for layer in manager.layers]
            for level in (Level.SAVE_MATMULS, Level.SAVE_ATTENTION)
        )
        tokens = SEQ // (layout.cp * (layout.tp if layout.shards_tokens else 1))
        return collectives.counts, [(more - less) / tokens for more, less in zip(middle, least, strict=True)]


def check(name: str) -> None:
    precision = Precision.BF16_AUTOCAST if "autocast" in name else Precision.FP32
    layout, model, _ = layout_of(name.replace("_autocast", ""))
    shape = preset("tiny", **(SHAPE | model))
    block = BlockFigures(
        shape,
        SEQ,
        ElementSizes.of(precision),
        batch=ROWS,
        tp=layout.tp,
        cp=layout.cp,
        rings=layout.rings(shape),
    ).block()
    plain, _ = measured(shape, layout, precision, 1.0)
    exchanges = 0 if layout.rings(shape) else 4  # what goes around a ring goes within attention
    at_matmuls = Counts(alltoall_base_=round(exchanges * block.exchanges_again_at_matmuls))
    at_attention = Counts(alltoall_base_=round(exchanges * block.exchanges_again))
    if layout.tp > 1 and layout.shards_tokens:
        at_attention += Counts(_allgather_base_=2, _reduce_scatter_base_=1)
    elif layout.tp > 1:
        at_attention += Counts(allreduce_=1)
    if layout.tp_overlap:  # two halves
        at_attention += at_attention
    mixed = (0.25, 0.5, 0.25)
    for alpha, expected in [
        ((0, 1, 0), at_matmuls),
        ((0, 0, 1), at_attention),
        (mixed, at_attention + at_matmuls),  # each range repeats its own
    ]:
        counts, told = measured(shape, layout, precision, alpha)
        again = {kind: count / (LAYERS - 1) for kind, count in (counts - plain).items()}  # the last layer stays
        assert all(count <= expected[kind] for kind, count in again.items()), f"{name} at {alpha}: {again}"
        assert len(told) == LAYERS
        if layout.tp == 1 or layout.shards_tokens:
            assert max(told) <= ROWS * block.matmuls, (
                f"{name}: {told} bytes a token, more than {ROWS} x {block.matmuls}"
            )


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
