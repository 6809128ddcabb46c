"""Layers that send each token to two of four experts, whose choice changes from step to step. Shared by tests."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, WIDE, EXPERTS, CHOICES = 32, 64, 4, 2


class GroupedExperts(nn.Module):
    """A dense MLP, then experts over rows that are sorted by expert, as one grouped product each way.

    Args:
        behind: another dense MLP follows, on what the experts gave.
    """

    def __init__(self, *, behind: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(3)])
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.wide = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE) / 8)
        self.narrow = nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN) / 8)
        self.behind = nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.GELU(), nn.Linear(WIDE, HIDDEN)) if behind else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.norms[0](x))))
        tokens = self.norms[1](x).flatten(0, 1)
        weights, chosen = self.router(20 * tokens).softmax(-1).topk(CHOICES)
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(EXPERTS), right=True, out_int32=True)
        inner = F.silu(F.grouped_mm(tokens[order // CHOICES], self.wide, offs=ends))
        outer = F.grouped_mm(inner, self.narrow, offs=ends)[order.argsort()].unflatten(0, (-1, CHOICES))
        x = x + (outer * weights.unsqueeze(-1)).sum(1).view_as(x)
        return x if self.behind is None else x + self.behind(self.norms[2](x))  # type: ignore[no-any-return]
