"""Runs under torchrun: a layer in overlapped halves against the same layer as a whole.

Says `<dtype> <rows>: output <d>, input's gradient <d>, gradients of weights <d>` with the largest differences, in units of
the largest entry of each tensor.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from equality_worker import CPU, SEQ

from memo.gpt import preset
from memo.gpt.model.build_rank import build_stages
from memo.gpt.model.rotary import rotary_tables
from memo.parallel import Layout, World, join

SHAPE = preset("tiny", variant="llama", vocab_size=61, max_seq=SEQ, layers=1, hidden=256, heads=4, kv_heads=4, ffn=512)


def results(dtype: torch.dtype, rows: int, *, overlap: bool, sequence: bool) -> list[list[torch.Tensor]]:
    """Output, gradient of the input, gradients of the parameters."""
    layout = Layout(tp=dist.get_world_size(), tp_overlap=overlap, sequence_parallel=sequence)
    layout.check(SHAPE, seq=SEQ, batch=rows, microbatches=1)
    (stage,) = build_stages(SHAPE, World.of(layout, "cpu"), seq=SEQ, device=CPU, dtype=dtype, seed=7)
    (layer,) = stage.layers.values()
    own = SEQ // (layout.tp if sequence else 1)
    torch.manual_seed(dist.get_rank() if sequence else 0)
    x = torch.randn(rows, own, SHAPE.hidden).to(dtype).requires_grad_()
    out = layer(x, rotary_tables(SEQ, SHAPE.head_dim, 1e4, device=CPU, dtype=dtype), None)
    grads = torch.autograd.grad(out, [x, *layer.parameters()], torch.randn(out.shape).to(dtype))
    return [[out.detach()], [grads[0]], [grad.to_local() for grad in grads[1:]]]


def main() -> None:
    """Arguments: `whole` or `sequence`, then numbers of rows."""
    torch.set_num_threads(1)
    with join(CPU):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for rows in map(int, sys.argv[2:]):
                sequence = sys.argv[1] == "sequence"
                want = results(dtype, rows, overlap=False, sequence=sequence)
                got = results(dtype, rows, overlap=True, sequence=sequence)
                worst = torch.tensor([
                    max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
                    for ours, theirs in zip(got, want, strict=True)
                ])  # fmt: skip
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                output, entered, weights = worst.tolist()
                if dist.get_rank() == 0:
                    said = f"output {output:.3g}, input's gradient {entered:.3g}, gradients of weights {weights:.3g}"
                    print(f"{dtype} {rows}: {said}", flush=True)


if __name__ == "__main__":
    main()
