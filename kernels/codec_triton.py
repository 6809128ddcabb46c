"""Triton kernels of `codec`: each program codes or decodes GROUPS whole groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memo.kernels.codec import GROUP, LARGEST, SMALLEST, Codec, scales_in

GROUPS = 32  # per program: two 16-byte accesses per thread for bfloat16
GROUP_OF_VALUES = tl.constexpr(GROUP)
SMALLEST_OF_GROUP = tl.constexpr(SMALLEST)
LARGEST_OF_GROUP = tl.constexpr(LARGEST)

# (x + ROUNDS) - ROUNDS is x rounded to an integer, ties to even, for |x| below 2^22.
ROUNDS = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _to_e4m3(x):
    """Nearest e4m3 code of |x| <= 448, ties to even, in integer arithmetic: sm_80 has no instruction for it."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((tl.abs(x) * 512.0 + ROUNDS) - ROUNDS).to(tl.int32)
    code = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_e4m3(code):
    magnitude = (code & 0x7F).to(tl.int32)
    normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 128, -value, value)


@triton.jit
def _groups(count, SIZE: tl.constexpr):
    """Indices for SIZE groups: each value's index and its mask; each group's index and its mask."""
    group = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    i = group[:, None] * GROUP_OF_VALUES + tl.arange(0, GROUP_OF_VALUES)[None, :]
    return i, i < count, group, group * GROUP_OF_VALUES < count


@triton.jit
def _encode_kernel(values, codes, scales, count, INT8: tl.constexpr, SIZE: tl.constexpr):
    """Encodes SIZE groups: amax' = max(amax, SMALLEST); scale = amax' / top; code(x * (top / amax'))."""
    i, inside, group, exists = _groups(count, SIZE)
    x = tl.load(values + i, mask=inside, other=0.0).to(tl.float32)
    unfit = tl.max((~(tl.abs(x) <= LARGEST_OF_GROUP)).to(tl.int32), axis=1) > 0
    x = tl.where(unfit[:, None], 0.0, x)
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST_OF_GROUP)
    top = tl.full((SIZE,), 127.0 if INT8 else 448.0, tl.float32)
    scaled = x * tl.div_rn(top, amax)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -top[:, None]), top[:, None])
    if INT8:
        code = ((scaled + ROUNDS) - ROUNDS).to(tl.int32).to(tl.uint8)
    else:
        code = _to_e4m3(scaled)
    tl.store(codes + i, code, mask=inside)
    tl.store(scales + group, tl.where(unfit, float("nan"), tl.div_rn(amax, top)), mask=exists)


@triton.jit
def _decode_kernel(codes, scales, values, count, INT8: tl.constexpr, SIZE: tl.constexpr):
    """Decodes SIZE groups: x = value(code) * scale."""
    i, inside, group, exists = _groups(count, SIZE)
    code = tl.load(codes + i, mask=inside, other=0)
    scale = tl.load(scales + group, mask=exists, other=0.0)
    if INT8:
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        value = _from_e4m3(code)
    tl.store(values + i, (value * scale[:, None]).to(values.dtype.element_ty), mask=inside)


def encode(values: torch.Tensor, block: torch.Tensor, codec: Codec) -> None:
    """Implements `codec.encode`."""
    count = values.numel()
    if count:
        scales, is_int8 = scales_in(block, count, codec), codec is Codec.INT8
        _encode_kernel[_programs(count)](values, block, scales, count, is_int8, GROUPS, num_warps=8)


def decode(block: torch.Tensor, values: torch.Tensor, codec: Codec) -> None:
    """Implements `codec.decode`."""
    count = values.numel()
    if count:
        scales, is_int8 = scales_in(block, count, codec), codec is Codec.INT8
        _decode_kernel[_programs(count)](block, scales, values, count, is_int8, GROUPS, num_warps=8)


def _programs(count: int) -> tuple[int]:
    return (-(-count // (GROUP * GROUPS)),)
