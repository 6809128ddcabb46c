"""What an autograd function of memo.parallel computes in each half of a pipeline's split backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from memo.parallel import is_wanted


class _Asks(torch.autograd.Function):
    """x @ w, which notes the gradients that are wanted."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return scale * x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        x, weight = ctx.saved_tensors
        asked.append((is_wanted(ctx, 0), is_wanted(ctx, 1)))
        return grad @ weight.T, None, x.T @ grad


asked: list[tuple[bool, bool]] = []


def test_a_function_is_told_which_gradients_a_backward_uses() -> None:
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def loss() -> torch.Tensor:
        asked.clear()
        return _Asks.apply(x.tanh(), 2.0, weight).sum()  # type: ignore[no-untyped-call, no-any-return]

    loss().backward()
    assert asked == [(True, True)]
    torch.autograd.grad(loss(), x)
    assert asked == [(True, False)]
    torch.autograd.grad(loss(), weight)
    assert asked == [(False, True)]
    loss().backward(inputs=[weight])
    assert asked == [(False, True)]
    first = loss()
    _, groups = stage_backward_input([first], None, [x], iter([weight]))
    assert asked == [(True, False)]
    weight.grad = None
    stage_backward_weight(iter([weight]), groups)
    assert asked == [(True, False), (False, True)]
    assert weight.grad is not None
