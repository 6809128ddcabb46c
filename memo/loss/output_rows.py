"""Where the rows of the output projection are: here, all of them, or a shard on each rank of a group.

Owns the reductions over the vocabulary that the loss needs, and no tensor. With shards each rank holds the logits of its
own rows alone; what travels is three numbers a token and the gradient of the hidden states. Where ranks hold different
tokens, as under sequence parallelism, the hidden states travel too: a chunk of each rank's at a time, never all.

    rank 0  logits of rows [0, 100)    -> max, sum of exponentials, logit of the target if it is here, else 0
    rank 1  logits of rows [100, 180)  -> the same; reduced over the ranks

The invariant: every rank of a group calls the same methods in the same order with equally many tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
import torch.distributed as dist

from memo.parallel import all_gathered, reduce_scattered

__all__ = ["Vocabulary", "VocabularyShard", "WholeVocabulary"]


class Vocabulary(Protocol):
    """How logits of some rows become statements about all rows. `logits` is (tokens, rows here)."""

    @property
    def token_shards(self) -> int:
        """Ranks that hold different tokens."""

    def widest(self, rows: int) -> int:
        """The most rows any rank holds, `rows` being those here: the same number on every rank."""

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (tokens, ...) of this rank's tokens -> of those of every rank, in an order that is the same everywhere."""

    def counted(self, here: torch.Tensor) -> torch.Tensor:
        """How many of all tokens count, `here` being those of this rank's."""

    def reduce(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log of the sum of exponentials of all rows, logit of the target), each (tokens, 1)."""

    def subtract_targets(self, slope: torch.Tensor, targets: torch.Tensor) -> None:
        """Takes one from each token's target, where it is here."""

    def sum_over_ranks(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """The gradient of this rank's hidden states; each rank has the part of its own rows, for all tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WholeVocabulary:
    """All rows are here."""

    @property
    def token_shards(self) -> int:
        return 1

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def counted(self, here: torch.Tensor) -> torch.Tensor:
        return here

    def widest(self, rows: int) -> int:
        return rows

    def reduce(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.logsumexp(dim=-1, keepdim=True), logits.gather(-1, targets)

    def subtract_targets(self, slope: torch.Tensor, targets: torch.Tensor) -> None:
        slope.scatter_(-1, targets, slope.gather(-1, targets) - 1)

    def sum_over_ranks(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        return grad_hidden


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """Rows from `first` on are here, the others on the other ranks of `group`."""

    group: dist.ProcessGroup
    first: int
    """Row of the whole matrix that is the first here."""
    largest: int
    """Rows of the largest shard: with uneven shards the ranks must still agree on the chunks of tokens."""
    divides_tokens: bool = False
    """Each rank has its own tokens; otherwise all have the same."""

    @classmethod
    def of(cls, vocab_size: int, group: dist.ProcessGroup, *, divides_tokens: bool) -> VocabularyShard:
        """Rows divided as a DTensor divides them: equally, and the last rank has fewer where they do not divide."""
        largest = -(-vocab_size // group.size())
        return cls(group=group, first=group.rank() * largest, largest=largest, divides_tokens=divides_tokens)

    @property
    def token_shards(self) -> int:
        return self.group.size() if self.divides_tokens else 1

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        return all_gathered(x, self.group, 0) if self.divides_tokens else x

    def counted(self, here: torch.Tensor) -> torch.Tensor:
        if self.divides_tokens:
            dist.all_reduce(here, dist.ReduceOp.SUM, self.group)
        return here

    def widest(self, rows: int) -> int:
        return self.largest

    def reduce(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if logits.shape[-1]:
            top = logits.amax(dim=-1, keepdim=True)
        else:
            top = torch.full_like(targets, -torch.inf, dtype=logits.dtype)
        dist.all_reduce(top, dist.ReduceOp.MAX, self.group)
        here, row = self._rows(logits, targets)
        found = logits.gather(-1, row).where(here, 0) if logits.shape[-1] else torch.zeros_like(top)
        parts = torch.stack([(logits - top).exp_().sum(dim=-1, keepdim=True), found])
        dist.all_reduce(parts, dist.ReduceOp.SUM, self.group)
        return parts[0].log_().add_(top), parts[1]

    def subtract_targets(self, slope: torch.Tensor, targets: torch.Tensor) -> None:
        if slope.shape[-1]:
            here, row = self._rows(slope, targets)
            slope.scatter_(-1, row, slope.gather(-1, row) - here.to(slope.dtype))

    def sum_over_ranks(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        if self.divides_tokens:
            return reduce_scattered(grad_hidden, self.group, 0)
        dist.all_reduce(grad_hidden, dist.ReduceOp.SUM, self.group)
        return grad_hidden

    def _rows(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(is the target here, its row here or 0)."""
        row = targets - self.first
        here = (row >= 0) & (row < logits.shape[-1])
        return here, row.where(here, 0)
