"""Tiled MLP: computes its wide activations one tile at a time, in forward and backward. Exact; three more matrix products.

At a million tokens the wide activations of one layer and their gradients are twelve times its input. Here none of them is
saved and at most one tile of them exists. Backward recomputes them twice, in tiles of two kinds:

    forward                      out[tokens]      a tile of tokens, all columns
    gradients of the weights     dW[columns]      all tokens, a tile of the wide columns
    gradient of the input        dx[tokens]       a tile of tokens, all columns

Invariant: no sum is split. Each element of a result is one element of one matrix product over its whole inner dimension, as
without tiles. (Tiles of tokens alone would sum the weights' gradients tile by tile.) Only the order of additions that a BLAS
chooses for another shape can differ: in float32 and bfloat16 the tests see equal bits on a CPU, in float64 up to 2^-50 of
the result's norm. Tiles are multiples of ALIGNED, since a BLAS does choose another order for a few remaining rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from memo.swap import recomputable

Activation = Callable[..., torch.Tensor]

ALIGNED = 128


def tiled_mlp(
    x: torch.Tensor, *, tiles: int, activation: Activation, wide: Sequence[nn.Linear], down: nn.Linear
) -> torch.Tensor:
    """Computes down(activation(*[linear(x) for linear in wide])) in tiles.

    Matrix products run in the autocast dtype where autocast is on. The result is differentiable once. Under tensor
    parallelism the tiles are of this rank's columns, and only the input's shard is saved.

    Args:
        x: (..., hidden).
        tiles: approximate number of tiles, since a tile is a multiple of ALIGNED.
        activation: element-wise function of one tensor per wide linear.
        wide: linears from hidden to the wide dimension.
        down: linear from the wide dimension to hidden.

    Raises:
        UsageError: the weights are sharded by something else than memo's tensor parallelism.
    """
    if hasattr(down.weight, "device_mesh"):  # a DTensor; its module is slow to import
        from memo.parallel import row_sum

        return row_sum(down, tiled_part(x, tiles=tiles, activation=activation, wide=wide, down=down))
    return _tiled(x, x, _identity, tiles, activation, [(linear.weight, linear.bias) for linear in (down, *wide)])


def tiled_part(
    x: torch.Tensor, *, tiles: int, activation: Activation, wide: Sequence[nn.Linear], down: nn.Linear
) -> torch.Tensor:
    """This rank's part of a divided `tiled_mlp`, before the sum over the ranks; arguments and errors as there."""
    from memo.parallel import kept_for, own_parts

    return _tiled(x, *kept_for(x), tiles, activation, [own_parts(linear) for linear in (down, *wide)])


def _identity(kept: torch.Tensor) -> torch.Tensor:
    return kept


def _tiled(
    x: torch.Tensor,
    kept: torch.Tensor,
    rebuild: Callable[[torch.Tensor], torch.Tensor],
    tiles: int,
    activation: Activation,
    pairs: Sequence[_Pair],
) -> torch.Tensor:
    """Saves `kept`, from which `rebuild` makes `x` in backward; `pairs` are weight and bias, those of `down` first."""
    kind, compute = x.device.type, x.dtype
    if torch.is_autocast_enabled(kind):
        compute = torch.get_autocast_dtype(kind)
    # Casts are outside of the autograd.Function, so autograd has their backward.
    cast_ = [None if parameter is None else parameter.to(compute) for pair in pairs for parameter in pair]
    kept = x.to(compute) if kept is x else kept
    flat = _Saved.apply(x.flatten(0, -2).to(compute), kept)  # type: ignore[no-untyped-call]
    out = _TiledMlp.apply(flat, kept, rebuild, tiles, activation, *cast_)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", out.unflatten(0, x.shape[:-1]))


class _Saved(torch.autograd.Function):
    """Identity on `x` that saves `kept` before the MLP runs.

    The MLP itself saves it after it ran, so without this a recompute that needs only `kept` would run the whole MLP.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _TiledMlp(torch.autograd.Function):
    """MLP over x (tokens, hidden); `parameters` are weight and bias of `down`, then of each wide linear."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        kept: torch.Tensor,
        rebuild: Callable[[torch.Tensor], torch.Tensor],
        tiles: int,
        activation: Activation,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(kept, *parameters)
        ctx.rebuild, ctx.tiles, ctx.activation = rebuild, tiles, activation
        return _tile_by_tile(x, tiles, activation, parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from memo.parallel import is_wanted

        kept, *parameters = ctx.saved_tensors
        x = ctx.rebuild(kept).flatten(0, -2)
        down, *wide = _pairs(parameters)
        grads: list[torch.Tensor | None] = [None] * 5
        with torch.autocast(x.device.type, enabled=False):
            if any(is_wanted(ctx, tensor) for tensor in range(2, 2 + len(parameters))):
                grads += _parameter_gradients(x, grad, ctx.tiles, ctx.activation, down, wide)
            else:
                grads += [None] * len(parameters)
            if is_wanted(ctx, 0):
                grads[0] = _input_gradient(x, grad, ctx.tiles, ctx.activation, down, wide)
        return tuple(grads)


_Pair = tuple[torch.Tensor, torch.Tensor | None]


@recomputable
def _tile_by_tile(
    x: torch.Tensor, tiles: int, activation: Activation, parameters: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    down, *wide = _pairs(parameters)
    out = x.new_empty(x.shape[0], down[0].shape[0])
    with torch.autocast(x.device.type, enabled=False):
        for tokens in _tiles(x.shape[0], tiles):
            out[tokens] = F.linear(activation(*(F.linear(x[tokens], *pair) for pair in wide)), *down)
    return out


def _pairs(parameters: Sequence[torch.Tensor | None]) -> list[_Pair]:
    return [(cast("torch.Tensor", parameters[i]), parameters[i + 1]) for i in range(0, len(parameters), 2)]


def _tiles(length: int, tiles: int) -> Iterator[slice]:
    step = -(-length // (tiles * ALIGNED)) * ALIGNED
    for first in range(0, length, step):
        yield slice(first, min(first + step, length))


def _parameter_gradients(
    x: torch.Tensor, grad: torch.Tensor, tiles: int, activation: Activation, down: _Pair, wide: Sequence[_Pair]
) -> list[torch.Tensor | None]:
    """Gradients of all parameters, one tile of wide columns at a time."""
    grad_down = torch.empty_like(down[0])
    grads: list[torch.Tensor | None] = [grad_down, None if down[1] is None else grad.sum(0)]
    made = [(torch.empty_like(weight), None if bias is None else torch.empty_like(bias)) for weight, bias in wide]
    for columns in _tiles(down[0].shape[1], tiles):
        parts = [(weight[columns], None if bias is None else bias[columns]) for weight, bias in wide]
        narrow, inner = _activation_vjp(x, grad @ down[0][:, columns], activation, parts)
        grad_down[:, columns] = grad.T @ narrow
        del narrow
        for (weight, bias), one in zip(made, inner, strict=True):
            weight[columns] = one.T @ x
            if bias is not None:
                bias[columns] = one.sum(0)
    return grads + [part for pair in made for part in pair]


def _input_gradient(
    x: torch.Tensor, grad: torch.Tensor, tiles: int, activation: Activation, down: _Pair, wide: Sequence[_Pair]
) -> torch.Tensor:
    """Gradient of the input, one tile of tokens at a time."""
    made = torch.empty_like(x)
    for tokens in _tiles(x.shape[0], tiles):
        _, inner = _activation_vjp(x[tokens], grad[tokens] @ down[0], activation, wide)
        parts = [one @ weight for one, (weight, _) in zip(inner, wide, strict=True)]
        made[tokens] = functools.reduce(torch.add, parts)
    return made


def _activation_vjp(
    x: torch.Tensor, grad: torch.Tensor, activation: Activation, wide: Sequence[_Pair]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Output of the activation and the gradients of its inputs, for the gradient `grad` of its output."""
    inputs = [F.linear(x, *pair).requires_grad_() for pair in wide]
    with torch.enable_grad():
        result = activation(*inputs)
    return result.detach(), torch.autograd.grad(result, inputs, grad)
