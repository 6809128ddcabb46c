"""Triton kernels of `masks`: each program writes or reads SIZE bytes of packed bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memo.kernels.masks import mask_nbytes

SIZE = 512


@triton.jit
def _elements(count, SIZE: tl.constexpr):
    """Indices for SIZE bytes: each bit's element and its mask; each byte's index and its mask."""
    byte = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    i = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    return i, i < count, byte, byte * 8 < count


@triton.jit
def _pack_kernel(mask, bits, count, SIZE: tl.constexpr):
    """bits[j] = sum over b of (mask[8 j + b] != 0) << b."""
    i, inside, byte, exists = _elements(count, SIZE)
    element = tl.load(mask + i, mask=inside, other=0)
    packed = tl.sum((element != 0).to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=exists)


@triton.jit
def _unpack_kernel(bits, out, count, SIZE: tl.constexpr):
    """out[8 j + b] = (bits[j] >> b) & 1."""
    i, inside, byte, exists = _elements(count, SIZE)
    packed = tl.load(bits + byte, mask=exists, other=0).to(tl.int32)
    element = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    tl.store(out + i, element.to(tl.float32).to(out.dtype.element_ty), mask=inside)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Implements `masks.pack_mask`."""
    bits = torch.empty(mask_nbytes(mask.numel()), dtype=torch.uint8, device=mask.device)
    if bits.numel():
        _pack_kernel[_programs(bits)](_as_number(mask.contiguous()), bits, mask.numel(), SIZE)
    return bits


def unpack(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Implements `masks.unpack_mask`."""
    if bits.numel():
        _unpack_kernel[_programs(bits)](bits, _as_number(out), out.numel(), SIZE)
    return out


def _programs(bits: torch.Tensor) -> tuple[int]:
    return (-(-bits.numel() // SIZE),)


def _as_number(mask: torch.Tensor) -> torch.Tensor:
    """Views a bool tensor as the bytes 0 and 1 that it has in memory: in Triton a bool is one bit."""
    return mask.view(torch.uint8) if mask.dtype is torch.bool else mask
