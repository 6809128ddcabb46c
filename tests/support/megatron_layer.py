"""A layer as Megatron-Core has it: sequence first, divided by raw collectives in autograd functions, fused operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class _Enter(torch.autograd.Function):
    """The input on every rank; backward sums its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    """The sum over the ranks, in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Product(torch.autograd.Function):
    """A product whose backward adds to the weight's `main_grad` and gives a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad  # type: ignore[attr-defined]
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        ctx.main_grad.add_(grad.flatten(0, 1).t() @ x.flatten(0, 1))
        return grad @ weight, torch.zeros_like(weight)


class _BiasSwiglu(torch.autograd.Function):
    """silu(y1) * y2 of y + bias in one operation that saves its input alone."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, bias)
        first, second = (y + bias).chunk(2, -1)
        return F.silu(first) * second

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, bias = ctx.saved_tensors
        first, second = (y + bias).chunk(2, -1)
        s = torch.sigmoid(first)
        grads = torch.cat((grad * second * s * (1 + first * (1 - s)), grad * F.silu(first)), -1)
        return grads, grads.flatten(0, -2).sum(0)


class MegatronLayer(nn.Module):
    """Pre-norm attention and a gated MLP, of [tokens, rows, hidden]; each rank has its share of heads and units."""

    def __init__(self, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        ranks = dist.get_world_size()
        self.heads = heads // ranks
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        shapes = {
            "qkv": (3 * hidden // ranks, hidden),
            "out": (hidden, hidden // ranks),
            "up": (8 * hidden // ranks, hidden),
            "down": (hidden, 4 * hidden // ranks),
        }
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.randn(shape) / 8)
            parameter.main_grad = torch.zeros(shape)  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)
        self.bias = nn.Parameter(torch.zeros(8 * hidden // ranks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, rows, _ = x.shape
        mixed = _Product.apply(_Enter.apply(self.norm1(x)), self.qkv)  # type: ignore[no-untyped-call]
        q, k, v = (t.view(tokens, rows, self.heads, -1).permute(1, 2, 0, 3) for t in mixed.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(tokens, rows, -1)
        x = x + _Leave.apply(_Product.apply(out, self.out))  # type: ignore[no-untyped-call]
        up = _Product.apply(_Enter.apply(self.norm2(x)), self.up)  # type: ignore[no-untyped-call]
        down = _Product.apply(_BiasSwiglu.apply(up, self.bias), self.down)  # type: ignore[no-untyped-call]
        return x + _Leave.apply(down)  # type: ignore[no-any-return,no-untyped-call]
