"""Attention over a divided sequence: ranks exchange heads for tokens, attend to all tokens with some heads, and back.

DeepSpeed-Ulysses (Jacobs et al. 2023). The exchange saves nothing and q, k and v are saved once, exchanged; but attention
saves its result as it made it, and the projection after it saves the same exchanged back: 17 units of b·s·h where one rank
alone has 16, divided by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from memo.parallel.collectives import exchange

__all__ = ["Ulysses"]

_TOKENS, _HEADS = 1, 2

Attend = Callable[..., torch.Tensor]


class Ulysses:
    """`attend` for tensors of (batch, tokens / ranks, heads, head size); what else it takes is of all tokens."""

    def __init__(self, attend: Attend, group: dist.ProcessGroup) -> None:
        self._attend = attend
        self._group = group

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
        whole = [exchange(x, self._group, scatter=_HEADS, gather=_TOKENS) for x in (query, key, value)]
        return exchange(self._attend(*whole, *others), self._group, scatter=_TOKENS, gather=_HEADS)
