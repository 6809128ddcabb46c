"""Ulysses attention (DeepSpeed-Ulysses, Jacobs et al. 2023) over a divided sequence.

Ranks exchange heads for tokens, attend to all tokens with some of the heads, and exchange back. The exchange saves
nothing, and q, k and v are saved once, after it. Attention saves its result before the exchange back and the
projection saves it after: 17 units of b·s·h instead of one rank's 16, divided by all ranks.

Where the ranks do not divide the key/value heads, each of these goes to all ranks whose queries use it. Its gradient is the
sum of theirs, which the rank with the tokens adds up:

    8 query heads, 2 key/value heads A B, 4 ranks      queries 01 23 45 67, keys A A B B
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from memo.parallel.collectives import exchange
from memo.parallel.layout import key_copies

_TOKENS, _HEADS = 1, 2

Attend = Callable[..., torch.Tensor]


class Ulysses:
    """Attention over a divided sequence, called as `ulysses(query, key, value, *others)`.

    Args:
        attend: attention of (batch, tokens, heads, head size) tensors; `others` are passed to it and are of all tokens.
        group: ranks that share the sequence. Each has (batch, tokens / ranks, heads, head size) tensors, and gets the
            result in the shape of its query. Query heads must divide by the ranks.
    """

    def __init__(self, attend: Attend, group: dist.ProcessGroup) -> None:
        self._attend = attend
        self._group = group

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
        """Attends to the tokens of all ranks."""
        copies = key_copies(query.shape[_HEADS], key.shape[_HEADS], self._group.size())
        whole = [self._of_all_tokens(query), *(self._of_all_tokens(x, copies=copies) for x in (key, value))]
        return exchange(self._attend(*whole, *others), self._group, scatter=_TOKENS, gather=_HEADS)

    def _of_all_tokens(self, x: torch.Tensor, *, copies: int = 1) -> torch.Tensor:
        """This rank's heads, of all tokens, where `copies` of each head are divided among the ranks."""
        if copies > 1:
            x = x.repeat_interleave(copies, dim=_HEADS)
        return exchange(x, self._group, scatter=_HEADS, gather=_TOKENS)
