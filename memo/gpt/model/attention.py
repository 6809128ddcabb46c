"""Causal attention by a fused kernel, with fallback to the next kernel when one refuses in forward.

attention_kernel.py chooses the kernel; this module calls it. Invariant: attention is quadratic in memory only where every
fused kernel refused and the scores fit; local attention never is. Tensors are (batch, tokens, heads, head size); keys and
values have their own number of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from memo.gpt.model.attention_kernel import (
    AttentionKind,
    Kernel,
    KernelChoice,
    by_package,
    choose,
    is_refusal,
    refuse,
    require_scores_fit,
)
from memo.gpt.model.local_attention import local_attention
from memo.gpt.model.packed_documents import DocumentSpans
from memo.swap import memoize
from memo.torch_private import current_graph_task_id


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, window: int | None = None) -> torch.Tensor:
    """Causal attention, softmax(q k^T / sqrt(d)) v.

    Args:
        query: (batch, tokens, heads, head size).
        key: (batch, tokens, key/value heads, head size).
        value: as `key`.
        window: tokens that each one attends to, itself and those before it; None is all of them. A window of at least
            `tokens` has the bits of None.

    Returns:
        The attention output, of the shape of `query`.

    Raises:
        DeviceOutOfMemory: only the quadratic kernel takes these tensors, and their scores do not fit.
    """
    window = _within(window, query.shape[1])

    def run(choice: KernelChoice) -> torch.Tensor:
        if choice.kernel.package is not None:
            return by_package(choice.kernel, "flash_attn_func", query, key, value, **_window_size(window))
        return _by_torch(query, key, value, choice, window)

    return _with_fallback(run, query, key, batch=query.shape[0], seq=query.shape[1], local=window is not None)


@memoize
def attend_within(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: DocumentSpans, *, window: int | None = None
) -> torch.Tensor:
    """Causal attention within each document; tensors and errors as for `attend`.

    A kernel of torch is called once per document; packages take all documents in one call. Recompute reuses the
    result (`memoize`).

    Args:
        query: (batch, tokens, heads, head size).
        key: (batch, tokens, key/value heads, head size).
        value: as `key`.
        spans: the documents of the batch.
        window: as for `attend`; shorter documents have full attention.
    """
    q, k, v = flat = [tensor.flatten(0, 1) for tensor in (query, key, value)]
    window = _within(window, spans.longest)

    def run(choice: KernelChoice) -> torch.Tensor:
        if choice.kernel.package is not None:
            function, ends, longest = "flash_attn_varlen_func", spans.starts, spans.longest
            lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
            packed = by_package(choice.kernel, function, q, k, v, **lengths, **_window_size(window))
        else:
            documents = zip(*(tensor.split(spans.lengths) for tensor in flat), strict=True)
            packed = torch.cat([_by_torch(q[None], k[None], v[None], choice, window)[0] for q, k, v in documents])
        result: torch.Tensor = packed.view(query.shape)
        return result

    return _with_fallback(run, query, key, batch=1, seq=spans.longest, local=window is not None, packed=True)


def _within(window: int | None, tokens: int) -> int | None:
    """The window, or None where it reaches all tokens."""
    return None if window is None or window >= tokens else window


def _window_size(window: int | None) -> dict[str, Any]:
    """Argument of packages: tokens before and behind each one that it attends to besides."""
    return {} if window is None else {"window_size": (window - 1, 0)}


_BY_NAME = {kernel.value: kernel for kernel in Kernel}
"""A graph cannot call an enumeration: torch 2.11's compiler refuses it."""


def _with_fallback(
    run: Callable[[KernelChoice], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    batch: int,
    seq: int,
    local: bool,
    packed: bool = False,
) -> torch.Tensor:
    """Result of the first kernel that does not refuse. Raises DeviceOutOfMemory; see `attend`."""
    heads, head_dim = query.shape[2:]
    if torch.compiler.is_compiling():  # a graph has the kernel that it was compiled with
        kernel, repeats = _choice_of(query.device, query.dtype, heads, key.shape[2], head_dim, local, packed)
        return run(KernelChoice(kernel=_BY_NAME[kernel], repeats=repeats))
    kind = _kind(query.device, query.dtype, heads, key.shape[2], head_dim, local, packed)
    while True:
        choice = choose(kind)
        if choice.kernel is Kernel.MATH:
            require_scores_fit(kind, batch=batch, seq=seq)
        try:
            return run(choice)
        except (RuntimeError, ImportError, AssertionError) as error:
            # In backward this is a recompute, which must use the kernel of its forward.
            in_backward = current_graph_task_id() >= 0
            is_last = choice.kernel in (Kernel.MATH, Kernel.BLOCKS)
            if is_last or in_backward or not is_refusal(error):
                raise
            refuse(kind, choice.kernel, error)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choice_of(*kind: Any) -> tuple[str, bool]:
    """Name of the chosen kernel and whether it repeats heads: of a constant's members a graph cannot be sure."""
    choice = choose(_kind(*kind))
    return choice.kernel.value, choice.repeats


def _kind(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, local: bool, packed: bool
) -> AttentionKind:
    return AttentionKind(
        device=device, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, local=local, packed=packed
    )


def _by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, choice: KernelChoice, window: int | None
) -> torch.Tensor:
    if window is not None:
        return _local(query, key, value, choice, window)
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


def _local(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, choice: KernelChoice, window: int
) -> torch.Tensor:
    if choice.kernel is Kernel.BLOCKS:
        return local_attention(query, key, value, window)
    tokens, nothing_dropped, sides = query.shape[1], 0.0, {"window_size_left": window - 1, "window_size_right": 0}
    result: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, tokens, tokens, nothing_dropped, False, False, **sides
    )[0]
    return result
