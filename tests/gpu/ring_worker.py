"""Runs under torchrun on GPUs: ring attention's result and gradients against one kernel over the whole sequence."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from memo.parallel import Ring, SequenceShards

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 2, 1024, 8, 4, 64
# bfloat16 results of order one, merged from parts: a few units in the last place, 2^-8 each.
BOUND = 2**-5


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    shapes = [(BATCH, SEQ, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *inputs, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    exact = [tensor.float().requires_grad_() for tensor in inputs]
    q, k, v = (tensor.transpose(1, 2) for tensor in exact)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    want = [whole, *torch.autograd.grad(whole, exact, grad.float())]

    own = SequenceShards.whole(SEQ).early_and_late(dist.get_rank(), dist.get_world_size())
    parts = [own.of(tensor).clone().requires_grad_() for tensor in inputs]
    assert dist.group.WORLD is not None
    out = Ring(dist.group.WORLD)(*parts)
    for got, of_whole in zip([out, *torch.autograd.grad(out, parts, own.of(grad))], want, strict=True):
        off = (got.float() - own.of(of_whole)).abs().max() / of_whole.abs().max()
        assert off < BOUND, float(off)
    print(f"rank {dist.get_rank()} equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
