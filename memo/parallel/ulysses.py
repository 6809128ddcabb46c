"""Attention over a divided sequence: ranks exchange heads for tokens, attend to all tokens with some heads, and back.

DeepSpeed-Ulysses (Jacobs et al. 2023). What autograd saves is what the attention itself saves, of the exchanged tensors:
the exchange saves nothing, so a rank's share of q, k and v stays the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from memo.parallel.collectives import exchange

__all__ = ["Ulysses"]

_TOKENS, _HEADS = 1, 2

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Ulysses:
    """`attend` for tensors of (batch, tokens / ranks, heads, head size)."""

    def __init__(self, attend: Attend, group: dist.ProcessGroup) -> None:
        self._attend = attend
        self._group = group

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        whole = [exchange(x, self._group, scatter=_HEADS, gather=_TOKENS) for x in (query, key, value)]
        return exchange(self._attend(*whole), self._group, scatter=_TOKENS, gather=_HEADS)
