"""Causal attention by a fused kernel, with fallback to the next kernel when one refuses in forward.

attention_kernel.py chooses the kernel; this module calls it. Invariant: attention is quadratic in memory only where every
fused kernel refused and the scores fit. Tensors are (batch, tokens, heads, head size); keys and values have their own number
of heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from memo.gpt.model.attention_kernel import Choice, Kernel, Kind, choose, is_refusal, refuse, require_scores_fit
from memo.gpt.model.packed_documents import DocumentSpans
from memo.swap import memoize

__all__ = ["attend", "attend_within"]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention, softmax(q k^T / sqrt(d)) v.

    Args:
        query: (batch, tokens, heads, head size).
        key: (batch, tokens, key/value heads, head size).
        value: as `key`.

    Returns:
        The attention output, of the shape of `query`.

    Raises:
        DeviceOutOfMemory: only the quadratic kernel takes these tensors, and their scores do not fit.
    """

    def run(choice: Choice) -> torch.Tensor:
        if choice.kernel is Kernel.FLASH_ATTN:
            result: torch.Tensor = importlib.import_module("flash_attn").flash_attn_func(query, key, value, causal=True)
            return result
        return _sdpa(query, key, value, choice)

    return _with_fallback(run, query, key, batch=query.shape[0], seq=query.shape[1])


@memoize
def attend_within(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: DocumentSpans) -> torch.Tensor:
    """Causal attention within each document; tensors and errors as for `attend`.

    The kernel is called once per document; the flash_attn package takes all documents in one call. Token-wise recompute
    reuses the result (`memoize`), since a part of the tokens would have other documents.

    Args:
        query: (batch, tokens, heads, head size).
        key: (batch, tokens, key/value heads, head size).
        value: as `key`.
        spans: the documents of the batch.
    """
    flat = [tensor.flatten(0, 1) for tensor in (query, key, value)]

    def run(choice: Choice) -> torch.Tensor:
        if choice.kernel is Kernel.FLASH_ATTN:
            function = importlib.import_module("flash_attn").flash_attn_varlen_func
            packed = function(*flat, spans.starts, spans.starts, spans.longest, spans.longest, causal=True)
        else:
            documents = zip(*(tensor.split(spans.lengths) for tensor in flat), strict=True)
            packed = torch.cat([_sdpa(q[None], k[None], v[None], choice)[0] for q, k, v in documents])
        result: torch.Tensor = packed.view(query.shape)
        return result

    return _with_fallback(run, query, key, batch=1, seq=spans.longest)


def _with_fallback(
    run: Callable[[Choice], torch.Tensor], query: torch.Tensor, key: torch.Tensor, *, batch: int, seq: int
) -> torch.Tensor:
    """Result of the first kernel that does not refuse. Raises DeviceOutOfMemory; see `attend`."""
    heads, head_dim = query.shape[2:]
    if torch.compiler.is_compiling():  # a graph has the kernel that it was compiled with
        return run(_choice_of(query.device, query.dtype, heads, key.shape[2], head_dim))
    kind = Kind.of(device=query.device, dtype=query.dtype, heads=heads, kv_heads=key.shape[2], head_dim=head_dim)
    while True:
        choice = choose(kind)
        if choice.kernel is Kernel.MATH:
            require_scores_fit(kind, batch=batch, seq=seq)
        try:
            return run(choice)
        except (RuntimeError, ImportError) as error:
            # In backward this is a recompute, which must use the kernel of its forward.
            in_backward = torch._C._current_graph_task_id() >= 0
            if choice.kernel is Kernel.MATH or in_backward or not is_refusal(error):
                raise
            refuse(kind, choice.kernel, error)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choice_of(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Choice:
    return choose(Kind.of(device=device, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim))


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, choice: Choice) -> torch.Tensor:
    groups = query.shape[2] // key.shape[2]
    if choice.repeats and groups > 1:
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        groups = 1
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    with _restricted_to(choice.kernel, query.device):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1).transpose(1, 2)


def _restricted_to(kernel: Kernel, device: torch.device) -> AbstractContextManager[None]:
    """Context that allows only `kernel`; a CPU has one fused kernel, which torch chooses by itself."""
    if kernel.backend is None or (device.type != "cuda" and kernel is not Kernel.MATH):
        return nullcontext()
    return sdpa_kernel(kernel.backend)
