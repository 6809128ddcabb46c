"""Norms, GELU and SwiGLU of some tokens, written where a reload buffer wants them, without a tensor in between.

A recompute of the last tokens of a layer makes results that belong into the tail of a larger buffer, whose head is being
reloaded at the same time. `out` is any view of shape (..., width) with contiguous rows; `x` likewise.

    buffer   |head ... |tail|head ... |tail|       out = buffer.view(rows, tokens, width)[:, first:]

The invariant: the result of a token depends on that token alone, to the last bit: all tokens at once and any range of
them alone give the same bytes. The kernels keep it for every shape. torch's operators on a CPU keep it where the width is
a multiple of 32, a vector's length: what is left over at a run's end they compute by another formula.

It does not hold between a kernel here and torch's own operator, which may differ in the last bit: gradients stay
bit-identical only where forward ran the same function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from memo.errors import UsageError
from memo.kernels.dispatch import current, on_triton

__all__ = [
    "gelu_into",
    "gelu_reference",
    "layer_norm_into",
    "layer_norm_reference",
    "rms_norm_into",
    "rms_norm_reference",
    "swiglu_into",
    "swiglu_reference",
]


def rms_norm_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019), in float32 inside."""
    _require_alike(out, x)
    if on_triton(out):
        from memo.kernels import tails_triton

        with current(out.device):
            tails_triton.rms_norm(out, x, weight, eps)
    else:
        out.copy_(rms_norm_reference(x, weight, eps))


def layer_norm_into(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, eps: float
) -> None:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016)."""
    _require_alike(out, x)
    if on_triton(out):
        from memo.kernels import tails_triton

        with current(out.device):
            tails_triton.layer_norm(out, x, weight, bias, eps)
    else:
        out.copy_(layer_norm_reference(x, weight, bias, eps))


def gelu_into(out: torch.Tensor, x: torch.Tensor) -> None:
    """out = x * Phi(x), the exact form with erf."""
    _require_alike(out, x)
    if on_triton(out):
        from memo.kernels import tails_triton

        with current(out.device):
            tails_triton.gelu(out, x)
    else:
        out.copy_(gelu_reference(x))


def swiglu_into(
    out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, activated: torch.Tensor | None = None
) -> None:
    """out = silu(gate) * up, and activated = silu(gate), which autograd saves as well where the two are separate.

    silu(gate) is rounded to its type before the product, as it is when the two run one after the other.
    """
    _require_alike(out, gate, up, *(() if activated is None else (activated,)))
    if on_triton(out):
        from memo.kernels import tails_triton

        with current(out.device):
            tails_triton.swiglu(out, gate, up, activated)
        return
    silu, product = swiglu_reference(gate, up)
    out.copy_(product)
    if activated is not None:
        activated.copy_(silu)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm_into` in torch."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`layer_norm_into` in torch."""
    wide = x.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype)


def gelu_reference(x: torch.Tensor) -> torch.Tensor:
    """`gelu_into` in torch."""
    return F.gelu(x.contiguous())  # values at a distance go the other formula's way


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(silu(gate), silu(gate) * up) in torch."""
    silu = F.silu(gate.contiguous())  # as in gelu_reference
    return silu, silu * up


def _require_alike(*tensors: torch.Tensor) -> None:
    first = tensors[0]
    for tensor in tensors[1:]:
        if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
            raise UsageError(
                f"tensors of one shape, type and device are needed, not {tuple(first.shape)} {first.dtype} on "
                f"{first.device} and {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
