"""Causal attention through a fused kernel, never through a matrix of scores.

Owns the choice of the kernel, made once for a device type and dtype. The invariant: no path here allocates anything
quadratic in the sequence. Layout at this border is (batch, tokens, heads, head size), keys and values with their own
number of heads.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util

import torch
import torch.nn.functional as F

__all__ = ["Kernel", "attend", "choose_kernel"]


class Kernel(enum.Enum):
    """How one attention is computed."""

    FLASH_ATTN = "flash_attn, the package"
    GROUPED = "scaled_dot_product_attention, which shares key/value heads itself"
    REPEATED = "scaled_dot_product_attention, key/value heads repeated to the query heads"


@functools.cache
def choose_kernel(device_type: str, dtype: torch.dtype, *, flash_attn: bool | None = None) -> Kernel:
    """The kernel for tensors of this kind; `flash_attn` says whether the package is there (default: look).

    The CPU flash kernel shares key/value heads itself (torch 2.9 and later), and so does CUDA's in half precision. In
    other precisions only CUDA's memory-efficient kernel is left, which does not: asked to, torch would quietly fall
    back to the quadratic one.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if device_type == "cuda":
        installed = importlib.util.find_spec("flash_attn") is not None if flash_attn is None else flash_attn
        if half and installed:
            return Kernel.FLASH_ATTN
        return Kernel.GROUPED if half else Kernel.REPEATED
    return Kernel.GROUPED


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal softmax(q k^T / sqrt(d)) v; the result is laid out as `query`."""
    kernel = choose_kernel(query.device.type, query.dtype)
    if kernel is Kernel.FLASH_ATTN:
        result: torch.Tensor = importlib.import_module("flash_attn").flash_attn_func(query, key, value, causal=True)
        return result
    groups = query.shape[2] // key.shape[2]
    if kernel is Kernel.REPEATED and groups > 1:
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        groups = 1
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1).transpose(1, 2)
