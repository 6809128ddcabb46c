"""Causal attention through a fused kernel, never through a matrix of scores where that could not fit.

The kernel is chosen in attention_kernel.py; here it is called, and where it refuses in forward the next is. The invariant:
what runs is quadratic in memory only where every fused kernel refused and the scores fit. Layout at this border is (batch,
tokens, heads, head size), keys and values with their own number of heads.
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
    """Causal softmax(q k^T / sqrt(d)) v; the result is laid out as `query`.

    Raises:
        DeviceOutOfMemory: only the quadratic kernel takes these tensors, and their scores do not fit.
    """

    def run(choice: Choice) -> torch.Tensor:
        if choice.kernel is Kernel.FLASH_ATTN:
            result: torch.Tensor = importlib.import_module("flash_attn").flash_attn_func(query, key, value, causal=True)
            return result
        return _sdpa(query, key, value, choice)

    return _with_fallback(run, query, key, batch=query.shape[0], seq=query.shape[1])


@memoize(token_dim=1)  # type: ignore[untyped-decorator]
def attend_within(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: DocumentSpans) -> torch.Tensor:
    """`attend` within each document: no token sees another document's.

    A document is one call of the kernel, except in the flash_attn package, which takes all of them in one. The results are
    marked to be kept whole by a token-wise recompute: over a part of the tokens the documents would be others.
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
    """The result of the first kernel that does not refuse. Raises DeviceOutOfMemory; see `attend`."""
    heads, head_dim = query.shape[2:]
    kind = Kind.of(device=query.device, dtype=query.dtype, heads=heads, kv_heads=key.shape[2], head_dim=head_dim)
    while True:
        choice = choose(kind)
        if choice.kernel is Kernel.MATH:
            require_scores_fit(kind, batch=batch, seq=seq)
        try:
            return run(choice)
        except (RuntimeError, ImportError) as error:
            # In backward it is a recompute, which must not go another way than its forward went.
            in_backward = torch._C._current_graph_task_id() >= 0
            if choice.kernel is Kernel.MATH or in_backward or not is_refusal(error):
                raise
            refuse(kind, choice.kernel, error)


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, choice: Choice) -> torch.Tensor:
    groups = query.shape[2] // key.shape[2]
    if choice.repeats and groups > 1:
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        groups = 1
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    with _restricted_to(choice.kernel, query.device):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1).transpose(1, 2)


def _restricted_to(kernel: Kernel, device: torch.device) -> AbstractContextManager[None]:
    """Lets nothing but `kernel` run; a CPU has one fused kernel, which it takes by itself."""
    if kernel.backend is None or (device.type != "cuda" and kernel is not Kernel.MATH):
        return nullcontext()
    return sdpa_kernel(kernel.backend)
