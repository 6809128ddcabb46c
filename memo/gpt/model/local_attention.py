"""Local attention where no fused kernel has a window: blocks of queries, each with the keys that its windows reach.

    queries   [a, a + BLOCK)
    keys      [a - window + 1, a + BLOCK)     a band of the scores; a mask of one block cuts its two edges

One operator, `memo::local_attention`, that saves what fused attention saves: queries, keys, values, the result and one
statistic for each query and head. So a recorded layer has one attention, and memory is linear in the tokens. What a key gets
from several blocks is added in the order of the blocks: the bits are the same in every run.

A block is one call of the CPU's fused attention, which takes a mask; elsewhere it is matrix products and a softmax.
Tensors are (batch, tokens, heads, head size), within a block (batch, heads, tokens, head size).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

BLOCK = 128
"""Queries of a block; of 128 to 1,024 the fastest on a CPU, or close to it, at windows of 128 and 1,024."""

_aten = torch.ops.aten
_Tensors = tuple[torch.Tensor, ...]


def local_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention in which each token attends to `window` tokens, itself and those before it.

    Args:
        query: (batch, tokens, heads, head size).
        key: (batch, tokens, key/value heads, head size).
        value: as `key`.
        window: at least 1.

    Returns:
        The attention output, of the shape of `query`; differentiable once.
    """
    result: torch.Tensor = _forward(query, key, value, window)[0]
    return result


# An operator's types are in its schema: annotations of this module are strings.
_SCHEMA = "(Tensor query, Tensor key, Tensor value, int window) -> (Tensor, Tensor)"
_SCHEMA_BACKWARD = (
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, int window) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("memo::local_attention", mutates_args=(), schema=_SCHEMA)
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _allocated(query, key, value, window)
    kernel = _kernel(query)
    for block in _blocks(query, window):
        part, statistic = kernel.forward(*block.of_tensors(query, key, value), block.mask)
        out[:, block.queries] = part.transpose(1, 2)
        lse[:, block.queries] = statistic.transpose(1, 2)
    return out, lse


@_forward.register_fake
def _allocated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and log-sum-exp (batch, tokens, heads), in the type in which the scores are summed."""
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=_wide(query))


@torch.library.custom_op("memo::local_attention_backward", mutates_args=(), schema=_SCHEMA_BACKWARD)
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_query = query.new_empty(query.shape)
    sums = [tensor.new_zeros(tensor.shape, dtype=_wide(query)) for tensor in (key, value)]
    kernel = _kernel(query)
    for block in _blocks(query, window):
        after = [tensor[:, block.queries].transpose(1, 2) for tensor in (grad, out, lse)]
        parts = kernel.backward(*after, *block.of_tensors(query, key, value), block.mask)
        grad_query[:, block.queries] = parts[0].transpose(1, 2)
        for whole, part in zip(sums, parts[1:], strict=True):
            whole[:, block.keys] += part.transpose(1, 2)
    return grad_query, sums[0].to(key.dtype), sums[1].to(value.dtype)


@_backward.register_fake
def _allocated_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
    *tensors, ctx.window = inputs
    ctx.set_materialize_grads(False)  # the statistic has none
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.window), None


_forward.register_autograd(_gradients, setup_context=_save)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Queries of one block and the keys that they reach."""

    queries: slice
    keys: slice
    mask: torch.Tensor
    """Mask added to the scores, (queries, keys): 0 within the window, else minus infinity."""

    def of_tensors(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Tensors:
        return tuple(
            tensor[:, part].transpose(1, 2)
            for tensor, part in ((query, self.queries), (key, self.keys), (value, self.keys))
        )


def _blocks(query: torch.Tensor, window: int) -> Iterator[_Block]:
    tokens, mask = query.shape[1], query.new_empty(0)
    for first in range(0, tokens, BLOCK):
        stop, begin = min(first + BLOCK, tokens), max(first - window + 1, 0)
        if mask.shape != (stop - first, stop - begin):  # all but the first ones and the last one are alike
            mask = _mask(query, rows=stop - first, columns=stop - begin, window=window)
        yield _Block(queries=slice(first, stop), keys=slice(begin, stop), mask=mask)


def _mask(query: torch.Tensor, *, rows: int, columns: int, window: int) -> torch.Tensor:
    """Mask of queries whose last one has the last of the keys."""
    row = torch.arange(columns - rows, columns, device=query.device).unsqueeze(1)
    column = torch.arange(columns, device=query.device)
    hidden = (column > row) | (column <= row - window)
    return query.new_zeros(rows, columns).masked_fill_(hidden, -math.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """Attention of one block. Key/value heads may be fewer than query heads."""

    forward: Callable[..., _Tensors]
    """(query, key, value, mask) -> result, log-sum-exp (batch, heads, queries)."""
    backward: Callable[..., _Tensors]
    """(gradient, result, log-sum-exp, query, key, value, mask) -> gradients of query, key and value."""


def _kernel(query: torch.Tensor) -> _Kernel:
    return _FUSED if query.device.type == "cpu" else _PRODUCTS


def _fused_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> _Tensors:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask)
    return out, lse


def _fused_backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
) -> _Tensors:
    grads: _Tensors = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, False, attn_mask=mask
    )
    return grads


_FUSED = _Kernel(forward=_fused_forward, backward=_fused_backward)


def _scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    products = (query @ key.transpose(-1, -2)).to(_wide(query))
    return products / math.sqrt(query.shape[-1]) + mask


def _products_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> _Tensors:
    key, value = (_repeated(tensor, query) for tensor in (key, value))
    scores = _scores(query, key, mask)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(value.dtype) @ value, lse


def _products_backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
) -> _Tensors:
    # P = exp(S - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)) / sqrt(d), dQ = dS K, dK = dS^T Q (Dao et al. 2022).
    groups = query.shape[1] // key.shape[1]
    key, value = (_repeated(tensor, query) for tensor in (key, value))
    probabilities = (_scores(query, key, mask) - lse.unsqueeze(-1)).exp()
    grad_value = probabilities.to(grad.dtype).transpose(-1, -2) @ grad
    rows = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
    grad_scores = probabilities * ((grad @ value.transpose(-1, -2)) - rows) / math.sqrt(query.shape[-1])
    narrow = grad_scores.to(query.dtype)
    grad_key = narrow.transpose(-1, -2) @ query
    return narrow @ key, _summed(grad_key, groups), _summed(grad_value, groups)


_PRODUCTS = _Kernel(forward=_products_forward, backward=_products_backward)


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _summed(grad: torch.Tensor, groups: int) -> torch.Tensor:
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(2)
