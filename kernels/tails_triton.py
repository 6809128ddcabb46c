"""Triton kernels of `tails`: a program a token for the norms, SIZE values of one run for the rest; float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memo.errors import UsageError
from memo.kernels.runs import Runs, fold, runs_of

__all__ = ["gelu", "layer_norm", "rms_norm", "swiglu"]

SIZE = 2048
MAX_WIDTH = 1 << 16  # a token's values are held in registers


@triton.jit
def _rms_norm_kernel(
    out, x, weight, tokens, out_row, out_token, x_row, x_token, width, eps, SIZE: tl.constexpr
):  # fmt: skip
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    row, token = tl.program_id(0).to(tl.int64) // tokens, tl.program_id(0).to(tl.int64) % tokens
    i = tl.arange(0, SIZE)
    value = tl.load(x + row * x_row + token * x_token + i, mask=i < width, other=0.0).to(tl.float32)
    scale = tl.load(weight + i, mask=i < width, other=0.0).to(tl.float32)
    result = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps) * scale
    tl.store(out + row * out_row + token * out_token + i, result.to(out.dtype.element_ty), mask=i < width)


@triton.jit
def _layer_norm_kernel(
    out, x, weight, bias, tokens, out_row, out_token, x_row, x_token, width, eps,
    BIASED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias."""
    row, token = tl.program_id(0).to(tl.int64) // tokens, tl.program_id(0).to(tl.int64) % tokens
    i = tl.arange(0, SIZE)
    value = tl.load(x + row * x_row + token * x_token + i, mask=i < width, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / width
    centred = tl.where(i < width, value - mean, 0.0)
    scale = tl.load(weight + i, mask=i < width, other=0.0).to(tl.float32)
    result = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps) * scale
    if BIASED:
        result += tl.load(bias + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + token * out_token + i, result.to(out.dtype.element_ty), mask=i < width)


@triton.jit
def _gelu_kernel(out, x, run, per_run, out_stride, x_stride, SIZE: tl.constexpr):
    """out = x / 2 * (1 + erf(x / sqrt 2))."""
    program = tl.program_id(0).to(tl.int64)
    row, i = program // per_run, (program % per_run) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + row * x_stride + i, mask=i < run, other=0.0).to(tl.float32)
    result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(out + row * out_stride + i, result.to(out.dtype.element_ty), mask=i < run)


@triton.jit
def _swiglu_kernel(
    out, activated, gate, up, run, per_run, out_stride, activated_stride, gate_stride, up_stride,
    KEEPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """activated = gate / (1 + exp(-gate)); out = activated * up."""
    program = tl.program_id(0).to(tl.int64)
    row, i = program // per_run, (program % per_run) * SIZE + tl.arange(0, SIZE)
    value = tl.load(gate + row * gate_stride + i, mask=i < run, other=0.0).to(tl.float32)
    silu = (value / (1.0 + tl.exp(-value))).to(out.dtype.element_ty)
    if KEEPS:
        tl.store(activated + row * activated_stride + i, silu, mask=i < run)
    factor = tl.load(up + row * up_stride + i, mask=i < run, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + i, (silu.to(tl.float32) * factor).to(out.dtype.element_ty), mask=i < run)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """See `tails.rms_norm_into`."""
    if not out.numel():
        return
    tokens, programs, strides = _tokens(out, x)
    width = out.shape[-1]
    size, warps = _size(width)
    _rms_norm_kernel[(programs,)](out, x, weight.contiguous(), tokens, *strides, width, eps, size, num_warps=warps)


def layer_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
    """See `tails.layer_norm_into`."""
    if not out.numel():
        return
    tokens, programs, strides = _tokens(out, x)
    width = out.shape[-1]
    size, warps = _size(width)
    weight = weight.contiguous()
    added = weight if bias is None else bias.contiguous()
    _layer_norm_kernel[(programs,)](
        out, x, weight, added, tokens, *strides, width, eps, bias is not None, size, num_warps=warps
    )


def gelu(out: torch.Tensor, x: torch.Tensor) -> None:
    """See `tails.gelu_into`."""
    if not out.numel():
        return
    shape, strides = _rows(out, x)
    per_run = -(-shape.run // SIZE)
    _gelu_kernel[(shape.rows * per_run,)](out, x, shape.run, per_run, *strides, SIZE, num_warps=8)


def swiglu(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activated: torch.Tensor | None) -> None:
    """See `tails.swiglu_into`."""
    if not out.numel():
        return
    kept = out if activated is None else activated
    shape, strides = _rows(out, kept, gate, up)
    per_run = -(-shape.run // SIZE)
    _swiglu_kernel[(shape.rows * per_run,)](
        out, kept, gate, up, shape.run, per_run, *strides, activated is not None, SIZE, num_warps=8
    )


def _rows(*tensors: torch.Tensor) -> tuple[Runs, list[int]]:
    """The runs that all tensors have, and each one's distance between them."""
    shape, strides = fold(*tensors)
    if any(step[-1] != 1 for step in strides) or len(shape) > 2:
        for tensor in tensors:
            runs_of(tensor)  # says which of them is the reason
        raise UsageError("the tensors' runs are of different lengths; make one of them contiguous first")
    if len(shape) == 1:
        return Runs(rows=1, run=shape[0], stride=0), [0 for _ in strides]
    return Runs(rows=shape[0], run=shape[1], stride=0), [step[0] for step in strides]


def _tokens(out: torch.Tensor, x: torch.Tensor) -> tuple[int, int, list[int]]:
    """Tokens in a row, tokens in all, and row and token distances of `out` and of `x`."""
    if any(tensor.shape[-1] > 1 and tensor.stride(-1) != 1 for tensor in (out, x)):
        raise UsageError("the values of a token must be contiguous")
    shape, strides = fold(out[..., 0], x[..., 0])
    if len(shape) > 2:
        raise UsageError(f"tokens of shape {tuple(out.shape[:-1])} are not rows of tokens at one distance")
    if len(shape) == 1:
        return shape[0], shape[0], [0, strides[0][0], 0, strides[1][0]]
    return shape[1], shape[0] * shape[1], [*strides[0], *strides[1]]


def _size(width: int) -> tuple[int, int]:
    """Values a program has room for, and its warps: 8 values a thread, between 4 and 16 warps."""
    if width > MAX_WIDTH:
        raise UsageError(f"a norm over {width} values; at most {MAX_WIDTH}")
    size = triton.next_power_of_2(width)
    return size, min(16, max(4, size // 256))
