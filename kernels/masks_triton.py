"""Triton kernels of `masks`: a program makes, or reads, SIZE bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memo.errors import UsageError
from memo.kernels.masks import mask_nbytes
from memo.kernels.runs import Runs, runs_of

__all__ = ["pack", "unpack"]

SIZE = 512


@triton.jit
def _pack_kernel(mask, bits, run, stride, count, SIZE: tl.constexpr):
    """bits[j] = sum over b of (mask[8 j + b] != 0) << b."""
    byte = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    bit = tl.arange(0, 8)
    i = byte[:, None] * 8 + bit[None, :]
    element = tl.load(mask + (i // run) * stride + i % run, mask=i < count, other=0)
    packed = tl.sum((element != 0).to(tl.int32) << bit[None, :], axis=1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte * 8 < count)


@triton.jit
def _unpack_kernel(bits, out, run, stride, count, SIZE: tl.constexpr):
    """out[8 j + b] = (bits[j] >> b) & 1."""
    byte = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    bit = tl.arange(0, 8)
    i = byte[:, None] * 8 + bit[None, :]
    packed = tl.load(bits + byte, mask=byte * 8 < count, other=0).to(tl.int32)
    element = (packed[:, None] >> bit[None, :]) & 1
    tl.store(out + (i // run) * stride + i % run, element.to(tl.float32).to(out.dtype.element_ty), mask=i < count)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """See `masks.pack_mask`."""
    mask, runs = _runs(mask)
    bits = torch.empty(mask_nbytes(mask.numel()), dtype=torch.uint8, device=mask.device)
    if bits.numel():
        _pack_kernel[(-(-bits.numel() // SIZE),)](_as_number(mask), bits, runs.run, runs.stride, runs.count, SIZE)
    return bits


def unpack(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """See `masks.unpack_mask`."""
    runs = runs_of(out)
    if bits.numel():
        _unpack_kernel[(-(-bits.numel() // SIZE),)](bits, _as_number(out), runs.run, runs.stride, runs.count, SIZE)
    return out


def _runs(mask: torch.Tensor) -> tuple[torch.Tensor, Runs]:
    try:
        return mask, runs_of(mask)
    except UsageError:
        mask = mask.contiguous()
        return mask, runs_of(mask)


def _as_number(mask: torch.Tensor) -> torch.Tensor:
    """Triton holds a bool in one bit; in memory torch's is a byte of 0 or 1."""
    return mask.view(torch.uint8) if mask.dtype is torch.bool else mask
