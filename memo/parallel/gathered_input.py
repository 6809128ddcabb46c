"""Gathered inputs of column-parallel layers: all tokens in forward, the rank's shard saved for backward.

`enter` gathers an input once for all projections that read it. Each saves the shard, and backward gathers it once more
for all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from memo.parallel.collectives import (
    Pending,
    all_gathered,
    begin_copy_in,
    begin_gather,
    begin_gathering,
    copy_in,
    gather,
)
from memo.torch_private import will_engine_execute_node

Group = dist.ProcessGroup


def token_dim(x: torch.Tensor) -> int:
    """Dimension of the tokens of (batch, tokens, hidden) or (tokens, hidden)."""
    return x.ndim - 2


class _SharedGather:
    """The gather of one input, repeated once in backward for all projections that use it.

    `overlaps`: it runs beside the first one's product for the input's gradient.
    """

    def __init__(self, group: Group, dim: int, *, overlaps: bool = False) -> None:
        self.group = group
        self.dim = dim
        self.overlaps = overlaps
        self.consumers = 0
        self._waiting = 0
        self._begun: Pending | None = None
        self._again: torch.Tensor | None = None

    def begin_again(self, shard: torch.Tensor) -> None:
        """Begins the gather of `again`, if it is to run beside what comes first."""
        if self.overlaps and self._again is None and self._begun is None:
            self._begun = begin_gathering(shard, self.group, self.dim)

    def again(self, shard: torch.Tensor) -> torch.Tensor:
        """Gathers the input again, once; it is released after the last projection's backward."""
        if self._again is None:
            begun, self._begun = self._begun, None
            self._again = all_gathered(shard, self.group, self.dim) if begun is None else begun()
            self._waiting = self.consumers
        whole = self._again
        self._waiting -= 1
        if self._waiting == 0:
            self._again = None
        return whole


# Gathered storage -> (its gather, its shard, its version). Weak, since nothing that is saved may hold the gathered tensor.
_gathered: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[_SharedGather, torch.Tensor, int]] = (
    weakref.WeakKeyDictionary()
)


def _gather_of(x: torch.Tensor) -> tuple[_SharedGather, torch.Tensor] | None:
    """The gather that gave all of `x` in this order, and its shard; None for another tensor, or one written to since."""
    found = _gathered.get(x.untyped_storage()) if torch.is_grad_enabled() else None
    if found is None or found[2] != x._version or not x.is_contiguous() or x.nbytes != x.untyped_storage().nbytes():
        return None
    return found[:2]


def enter(x: torch.Tensor, group: Group, *, sequence: bool) -> torch.Tensor:
    """All tokens of `x`, as the projections read them."""
    if not sequence:
        return copy_in(x, group)
    x = _as_read(x)
    whole = gather(x, group, token_dim(x))
    _gathered[whole.untyped_storage()] = (_SharedGather(group, token_dim(x)), x.detach(), whole._version)
    return whole


def begin_enter(x: torch.Tensor, group: Group, *, sequence: bool) -> Pending:
    """Begins `enter`; backward overlaps, too."""
    if not sequence:
        return begin_copy_in(x, group)
    x = _as_read(x)
    gathered = begin_gather(x, group, token_dim(x))

    def entered() -> torch.Tensor:
        whole = gathered()
        gathering = _SharedGather(group, token_dim(x), overlaps=True)
        _gathered[whole.untyped_storage()] = (gathering, x.detach(), whole._version)
        return whole

    return entered


def _as_read(x: torch.Tensor) -> torch.Tensor:
    """`x` as products read it: cast under autocast, before the gather, to move and save half the bytes."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def kept_for(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Smallest tensor to save for backward in place of `x`, and the function that restores `x` from it.

    For an `x` that `Entry` gathered it is the shard, and restoring gathers again, once for all its projections. Otherwise
    `x` itself.
    """
    found = _gather_of(x)
    if found is None:
        return x, lambda kept: kept
    gathering, shard = found
    gathering.consumers += 1
    return shard, gathering.again


def is_wanted(ctx: Any, tensor: int) -> bool:
    """Whether the backward that runs uses the gradient of an autograd function's input.

    Of a pipeline's split backward one half uses those of weights, the other those of what comes before;
    `needs_input_grad` is of both.

    Args:
        ctx: the function's.
        tensor: number of the input, of those that are tensors.
    """
    edges = ctx.next_functions
    if tensor >= len(edges) or edges[tensor][0] is None:
        return False
    try:
        return bool(will_engine_execute_node(edges[tensor][0]))
    except RuntimeError:  # torch.autograd.grad with respect to this very input
        return True


class _LinearOfGathered(torch.autograd.Function):
    """Computes whole @ weight.T + bias, and saves the shard that `whole` was gathered from."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        shard: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gathering: _SharedGather,
    ) -> torch.Tensor:
        ctx.gathering = gathering
        ctx.save_for_backward(shard, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shard, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        wants_weight = is_wanted(ctx, 2)
        if wants_weight:
            ctx.gathering.begin_again(shard)
        of_input = grad @ weight if is_wanted(ctx, 0) else None
        of_weight = rows.T @ ctx.gathering.again(shard).flatten(0, -2) if wants_weight else None
        of_bias = rows.sum(0) if is_wanted(ctx, 3) else None
        return of_input, None, of_weight, of_bias, None


def gathered_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear, which saves the shard of a gathered `x` (..., inputs); `weight` is (outputs, inputs)."""
    found = _gather_of(x)
    if found is None:
        return F.linear(x, weight, bias)
    gathering, shard = found
    gathering.consumers += weight.requires_grad
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        weight, bias = weight.to(low), None if bias is None else bias.to(low)
    with torch.autocast(kind, enabled=False):
        result = _LinearOfGathered.apply(x, shard, weight, bias, gathering)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", result)
