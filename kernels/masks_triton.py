"""Triton kernels of `masks`: each program writes or reads SIZE bytes of packed bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memo.errors import UsageError
from memo.kernels.masks import mask_nbytes
from memo.kernels.strided_runs import Runs, runs_of

__all__ = ["pack", "unpack"]

SIZE = 512


@triton.jit
def _elements(run, stride, count, per_run, EVEN: tl.constexpr, SIZE: tl.constexpr):
    """Indices for SIZE bytes: each bit's element and its mask; each byte's index and its mask.

    EVEN: no byte holds bits of two runs, so a program stays in one run and divides once instead of per element.
    """
    program = tl.program_id(0).to(tl.int64)
    if EVEN:
        row = program // per_run
        byte = (program % per_run) * SIZE + tl.arange(0, SIZE)
        i = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
        return row * stride + i, i < run, row * (run // 8) + byte, byte * 8 < run
    byte = program * SIZE + tl.arange(0, SIZE)
    i = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    return (i // run) * stride + i % run, i < count, byte, byte * 8 < count


@triton.jit
def _pack_kernel(mask, bits, run, stride, count, per_run, EVEN: tl.constexpr, SIZE: tl.constexpr):
    """bits[j] = sum over b of (mask[8 j + b] != 0) << b."""
    where, inside, byte, exists = _elements(run, stride, count, per_run, EVEN, SIZE)
    element = tl.load(mask + where, mask=inside, other=0)
    packed = tl.sum((element != 0).to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=exists)


@triton.jit
def _unpack_kernel(bits, out, run, stride, count, per_run, EVEN: tl.constexpr, SIZE: tl.constexpr):
    """out[8 j + b] = (bits[j] >> b) & 1."""
    where, inside, byte, exists = _elements(run, stride, count, per_run, EVEN, SIZE)
    packed = tl.load(bits + byte, mask=exists, other=0).to(tl.int32)
    element = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    tl.store(out + where, element.to(tl.float32).to(out.dtype.element_ty), mask=inside)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Implements `masks.pack_mask`."""
    mask, runs = _runs(mask)
    bits = torch.empty(mask_nbytes(mask.numel()), dtype=torch.uint8, device=mask.device)
    if bits.numel():
        programs, *shape = _shape(runs)
        _pack_kernel[(programs,)](_as_number(mask), bits, *shape, SIZE)
    return bits


def unpack(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Implements `masks.unpack_mask`."""
    if bits.numel():
        programs, *shape = _shape(runs_of(out))
        _unpack_kernel[(programs,)](bits, _as_number(out), *shape, SIZE)
    return out


def _shape(runs: Runs) -> tuple[int, int, int, int, int, bool]:
    """Number of programs, and the kernel arguments run, stride, count, per_run and EVEN."""
    even = runs.rows == 1 or runs.run % 8 == 0
    per_run = -(-runs.run // (8 * SIZE))
    programs = runs.rows * per_run if even else -(-runs.count // (8 * SIZE))
    return programs, runs.run, runs.stride, runs.count, per_run, even


def _runs(mask: torch.Tensor) -> tuple[torch.Tensor, Runs]:
    try:
        return mask, runs_of(mask)
    except UsageError:
        mask = mask.contiguous()
        return mask, runs_of(mask)


def _as_number(mask: torch.Tensor) -> torch.Tensor:
    """Views a bool tensor as the bytes 0 and 1 that it has in memory: in Triton a bool is one bit."""
    return mask.view(torch.uint8) if mask.dtype is torch.bool else mask
