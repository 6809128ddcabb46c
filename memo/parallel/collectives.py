"""Differentiable collectives: each is a linear map, and its backward is the transposed one.

    copy_in     x on every rank            <->  sum of the gradients
    sum_out     sum of the partial x       <->  the gradient on every rank
    gather      shards to the whole        <->  sum of the gradients, a shard each
    scatter_sum partial wholes to a shard  <->  gradient shards to the whole
    split       the whole to a shard       <->  gradient shards to the whole; for an x that is equal on all ranks
    join        shards to the whole        <->  the gradient's shard; for a result that all ranks use in the same way
    exchange    heads for tokens           <->  tokens for heads
    exchange_rows  rows to their ranks     <->  the rows' gradients back

None of them saves a tensor. All but `begin_...` return when the result is complete. Exchanges between
ranks are declared (`memo.swap.recomputable`), so that layers made of them can be recomputed.

`begin_...` launch the collective and return a function that waits for its result. What the program computes between the
two runs beside the collective; in backward, which goes the other way, it runs beside the transposed one. They are torch's
functional collectives, which a recompute repeats in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from memo.swap import memoize, recomputable

Group = dist.ProcessGroup
_Map = Callable[[torch.Tensor], torch.Tensor]

# torch 2.13 has these two under new names, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_functional: Any = torch.ops._c10d_functional
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_in(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x` itself; backward sums the gradient over the group."""
    return cast("torch.Tensor", _CopyIn.apply(x, group))  # type: ignore[no-untyped-call]


def sum_out(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group, on every rank (all-reduce); backward passes the gradient on."""
    return _collective(x, partial(_summed, group=group), lambda grad: grad)


def gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """All-gather along `dim`; backward reduce-scatters, since each rank uses the whole in its own way."""
    return _collective(x, partial(all_gathered, group=group, dim=dim), partial(reduce_scattered, group=group, dim=dim))


def scatter_sum(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Reduce-scatter along `dim`: this rank's shard of the sum; backward all-gathers."""
    return _collective(x, partial(reduce_scattered, group=group, dim=dim), partial(all_gathered, group=group, dim=dim))


Pending = Callable[[], torch.Tensor]
"""Function that waits for a collective and returns its result."""


def begin_copy_in(x: torch.Tensor, group: Group) -> Pending:
    """Begins `copy_in`, of which only backward communicates."""
    return _begin(x, None, partial(_begin_summing, group=group))


def begin_sum_out(x: torch.Tensor, group: Group) -> Pending:
    """Begins `sum_out`."""
    return _begin(x, partial(_begin_summing, group=group), None)


def begin_gather(x: torch.Tensor, group: Group, dim: int) -> Pending:
    """Begins `gather`."""
    return _begin(x, partial(begin_gathering, group=group, dim=dim), partial(_begin_scattering, group=group, dim=dim))


def begin_scatter_sum(x: torch.Tensor, group: Group, dim: int) -> Pending:
    """Begins `scatter_sum`."""
    return _begin(x, partial(_begin_scattering, group=group, dim=dim), partial(begin_gathering, group=group, dim=dim))


def split(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's shard along `dim` of an `x` that is equal on all ranks; backward all-gathers."""

    def own(whole: torch.Tensor) -> torch.Tensor:
        return own_shard(whole, group, dim).clone(memory_format=torch.contiguous_format)

    return _collective(x, own, partial(all_gathered, group=group, dim=dim))


def join(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """All-gather along `dim`; backward takes this rank's shard, since all ranks use the whole in the same way."""

    def own(whole: torch.Tensor) -> torch.Tensor:
        return own_shard(whole, group, dim).contiguous()

    return _collective(x, partial(all_gathered, group=group, dim=dim), own)


def exchange(x: torch.Tensor, group: Group, *, scatter: int, gather: int) -> torch.Tensor:
    """All-to-all: divides dimension `scatter` over the ranks and makes dimension `gather` whole; backward reverses it."""
    return _collective(
        x,
        partial(_exchanged, group=group, scatter=scatter, gather=gather),
        partial(_exchanged, group=group, scatter=gather, gather=scatter),
    )


def exchange_rows(x: torch.Tensor, group: Group, sent: list[int], received: list[int]) -> torch.Tensor:
    """Rows for this rank, (sum of `received`, width), in the order of the ranks; backward sends their gradients back.

    Args:
        x: (rows, width), in the order of the ranks that they are for.
        group: the ranks.
        sent: rows for each rank.
        received: rows from each rank.
    """
    return _collective(
        x,
        partial(_rows_exchanged, group=group, sent=sent, received=received),
        partial(_rows_exchanged, group=group, sent=received, received=sent),
    )


@dataclasses.dataclass(slots=True)
class _Flight:
    """A collective, its transposed one, and the one of them that was launched; None is the identity."""

    forward: Callable[[torch.Tensor], Pending] | None
    backward: Callable[[torch.Tensor], Pending] | None
    pending: Pending | None = None

    def landed(self, link: torch.Tensor) -> torch.Tensor:
        """The result of what was launched; `link` where nothing was."""
        pending, self.pending = self.pending, None
        return link.view_as(link) if pending is None else pending()


def _begin(
    x: torch.Tensor,
    forward: Callable[[torch.Tensor], Pending] | None,
    backward: Callable[[torch.Tensor], Pending] | None,
) -> Pending:
    flight = _Flight(forward, backward)
    link = _Launch.apply(x, flight)  # type: ignore[no-untyped-call]
    return lambda: cast("torch.Tensor", _Landing.apply(link, flight))  # type: ignore[no-untyped-call]


class _Launch(torch.autograd.Function):
    """Launches the collective, and in backward waits for the transposed one. Passes `x` on to tie the two in the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        flight.pending = None if flight.forward is None else flight.forward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.flight.landed(grad), None


class _Landing(torch.autograd.Function):
    """Waits for the collective, and in backward launches the transposed one, whose result `_Launch` returns."""

    @staticmethod
    def forward(ctx: Any, link: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight, ctx.shape = flight, link.shape
        return flight.landed(link)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        flight: _Flight = ctx.flight
        if flight.backward is None:
            return grad, None
        flight.pending = flight.backward(grad)
        return grad.new_zeros(()).expand(ctx.shape), None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: _Map, backward: _Map) -> torch.Tensor:
        ctx.transposed = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transposed(grad), None, None


def _collective(x: torch.Tensor, forward: _Map, backward: _Map) -> torch.Tensor:
    """A linear map of the ranks' tensors, and in backward the transposed one."""
    return cast("torch.Tensor", _Collective.apply(x, forward, backward))  # type: ignore[no-untyped-call]


@memoize  # other ranks may not repeat the layer
def _rows_exchanged(x: torch.Tensor, group: Group, sent: list[int], received: list[int]) -> torch.Tensor:
    result = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result


def own_shard(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's shard of `x` along `dim`, a view."""
    part = x.size(dim) // group.size()
    return x.narrow(dim, group.rank() * part, part)


def begin_gathering(x: torch.Tensor, group: Group, dim: int) -> Pending:
    """Begins an all-gather along `dim`, contiguous; not differentiable."""
    shape = x.shape
    parts = _functional.all_gather_into_tensor(x.contiguous().view(-1), group.size(), group.group_name)
    parts = _launched(parts, group)
    return lambda: _joined(_functional.wait_tensor(parts).view(-1, *shape), dim)


def _begin_scattering(x: torch.Tensor, group: Group, dim: int) -> Pending:
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    shape = parts.shape[1:]
    own = _functional.reduce_scatter_tensor(parts.view(-1), "sum", group.size(), group.group_name)
    own = _launched(own, group)
    return lambda: cast("torch.Tensor", _functional.wait_tensor(own).view(shape))


def _launched(result: torch.Tensor, group: Group) -> torch.Tensor:
    """The result of a collective that was launched, on a CPU complete.

    One of some fifteen runs crashed in a thread of gloo (torch 2.13) while collectives were in flight, and on a CPU nothing
    overlaps.
    """
    if result.device.type != "cpu" or dist.get_backend(group) == "fake":
        return result
    return cast("torch.Tensor", _functional.wait_tensor(result))


def _begin_summing(x: torch.Tensor, group: Group) -> Pending:
    summed = _launched(_functional.all_reduce(x.contiguous(), "sum", group.group_name), group)
    return lambda: cast("torch.Tensor", _functional.wait_tensor(summed))


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """One tensor of the ranks' parts, contiguous. No copy where all dimensions before `dim` are of size one."""
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


@recomputable
def all_gathered(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """All-gather along `dim`, contiguous; not differentiable."""
    parts = x.new_empty((group.size(), *x.shape))
    _all_gather(parts.view(-1), x.contiguous().view(-1), group=group)
    return _joined(parts, dim)


@recomputable
def reduce_scattered(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Reduce-scatter along `dim`; not differentiable."""
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    result: torch.Tensor = parts.new_empty(parts.shape[1:])
    _reduce_scatter(result.view(-1), parts.view(-1), group=group)
    return result


@recomputable
def _summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


@recomputable
def _exchanged(x: torch.Tensor, group: Group, scatter: int, gather: int) -> torch.Tensor:
    parts = x.unflatten(scatter, (group.size(), -1)).movedim(scatter, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received.view(-1), parts.view(-1), group=group)
    joined: torch.Tensor = received.movedim(0, gather).flatten(gather, gather + 1).contiguous()
    return joined
