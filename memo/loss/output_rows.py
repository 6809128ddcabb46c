"""Rows of the output projection on one rank: the whole vocabulary, or a shard of it.

Owns the reductions over the vocabulary that the loss needs, and holds no tensor. With shards each rank has the logits
of its own rows only; ranks exchange three numbers a token and the gradient of the hidden states. Where ranks hold
different tokens (sequence parallelism) they also exchange hidden states, one chunk of each rank's at a time.

    rank 0  logits of rows [0, 100)    -> max, sum of exponentials, logit of the target if it is here, else 0
    rank 1  logits of rows [100, 180)  -> the same; reduced over the ranks

Invariant: all ranks of a group call the same methods in the same order with the same number of tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
import torch.distributed as dist

from memo.parallel import all_gathered, reduce_scattered


class Vocabulary(Protocol):
    """Reductions over the whole vocabulary from the logits (tokens, local rows) of one rank."""

    @property
    def token_shards(self) -> int:
        """Number of ranks with different tokens; 1 where all have the same."""

    def widest(self, rows: int) -> int:
        """Largest number of rows on any rank, the same number on every rank; `rows` are on this one."""

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers `x` (tokens, ...) over the ranks with different tokens, in the order of the ranks."""

    def counted(self, here: torch.Tensor) -> torch.Tensor:
        """Sum of `here`, the number of counted tokens, over the ranks with different tokens; a scalar, may overwrite it."""

    def log_softmax_over(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log softmax over all rows, (tokens, local rows), and of the targets, (tokens, 1)); may overwrite `logits`.

        `targets` is (tokens, 1), int64.
        """

    def set_targets(self, grad_logits: torch.Tensor, targets: torch.Tensor, values: torch.Tensor) -> None:
        """Writes `values` (tokens, 1) at the targets in `grad_logits` (tokens, local rows), where their row is local."""

    def sum_over_ranks(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """Gradient of this rank's hidden states, from the parts (all tokens, h) that each rank's rows contribute."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WholeVocabulary:
    """The whole vocabulary on this rank; no method communicates."""

    @property
    def token_shards(self) -> int:
        """One."""
        return 1

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def counted(self, here: torch.Tensor) -> torch.Tensor:
        """`here` itself."""
        return here

    def widest(self, rows: int) -> int:
        """`rows` itself."""
        return rows

    def log_softmax_over(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One kernel of torch's, since all rows are local."""
        log_softmax = logits.log_softmax(dim=-1)
        return log_softmax, log_softmax.gather(-1, targets)

    def set_targets(self, grad_logits: torch.Tensor, targets: torch.Tensor, values: torch.Tensor) -> None:
        """Every target is local."""
        grad_logits.scatter_(-1, targets, values)

    def sum_over_ranks(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """`grad_hidden` itself."""
        return grad_hidden


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """A shard of the vocabulary on each rank of `group`. Every method but `widest` may be a collective call."""

    group: dist.ProcessGroup
    first: int
    """Index of this rank's first row in the whole matrix."""
    largest: int
    """Rows of the largest shard, from which all ranks derive the same chunks of tokens."""
    divides_tokens: bool = False
    """Each rank has its own tokens (sequence parallelism); otherwise all have the same."""

    @classmethod
    def of(cls, vocab_size: int, group: dist.ProcessGroup, *, divides_tokens: bool) -> VocabularyShard:
        """Shards as DTensor's Shard(0) makes them: equal, with fewer rows on the last ranks where they do not divide."""
        largest = -(-vocab_size // group.size())
        return cls(group=group, first=group.rank() * largest, largest=largest, divides_tokens=divides_tokens)

    @property
    def token_shards(self) -> int:
        """Size of the group where it divides tokens."""
        return self.group.size() if self.divides_tokens else 1

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """All-gathers where tokens are divided."""
        return all_gathered(x, self.group, 0) if self.divides_tokens else x

    def counted(self, here: torch.Tensor) -> torch.Tensor:
        """All-reduces where tokens are divided."""
        if self.divides_tokens:
            dist.all_reduce(here, dist.ReduceOp.SUM, self.group)
        return here

    def widest(self, rows: int) -> int:
        """Rows of the largest shard."""
        return self.largest

    def log_softmax_over(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two all-reduces: the maximum, then the sum of exponentials and the target's logit."""
        if logits.shape[-1]:
            top = logits.amax(dim=-1, keepdim=True)
        else:
            top = torch.full_like(targets, -torch.inf, dtype=logits.dtype)
        dist.all_reduce(top, dist.ReduceOp.MAX, self.group)
        here, row = self._rows(logits, targets)
        found = logits.gather(-1, row).where(here, 0) if logits.shape[-1] else torch.zeros_like(top)
        parts = torch.stack([(logits - top).exp_().sum(dim=-1, keepdim=True), found])
        dist.all_reduce(parts, dist.ReduceOp.SUM, self.group)
        log_sum = parts[0].log_().add_(top)
        return logits.sub_(log_sum), parts[1] - log_sum

    def set_targets(self, grad_logits: torch.Tensor, targets: torch.Tensor, values: torch.Tensor) -> None:
        """Skips targets in other ranks' rows."""
        if grad_logits.shape[-1]:
            here, row = self._rows(grad_logits, targets)
            grad_logits.scatter_(-1, row, values.where(here, grad_logits.gather(-1, row)))

    def sum_over_ranks(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """All-reduces, or reduce-scatters where tokens are divided."""
        if self.divides_tokens:
            return reduce_scattered(grad_hidden, self.group, 0)
        dist.all_reduce(grad_hidden, dist.ReduceOp.SUM, self.group)
        return grad_hidden

    def _rows(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(mask of targets in local rows, their local row or 0)."""
        row = targets - self.first
        here = (row >= 0) & (row < logits.shape[-1])
        return here, row.where(here, 0)
