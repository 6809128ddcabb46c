"""Batches whose rows lie within one document each: what `memo train --documents whole` trains on.

Owns which rows there are and their order. A document is cut into rows of `seq` tokens from its start on; a row's targets
go one token further, the last row's to the end of the document. What is left at a document's end is too short for a row,
as are documents shorter than `seq`: both are left out, and counted. Every row comes once in an epoch, in an order that
is a function of the seed and the epoch alone, so nothing is saved and nothing restored. Evaluation has documents of its own.

    seq 4      a a a a a a a a a a .   b b b .   c c c c .
    rows       |------||------|                  |------|        of two documents; `b` and two tokens of `a` are left out
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch

from memo.errors import DataError, UsageError
from memo.gpt.data.batches import Split, check_numbers, windows
from memo.gpt.data.token_file import TokenFile
from memo.units import format_tokens

__all__ = ["DocumentBatches"]

_FIRST_STEP: dict[Split, int] = {"train": 1, "eval": 0}
"""Training counts its steps from one, evaluation from zero; an epoch begins with the first."""


class DocumentBatches:
    """Rows of `seq` tokens of one document each, and the tokens that follow each.

    `accumulate` is the number of microbatches that a step takes, so that no row comes twice in an epoch.

    Raises UsageError for numbers that mean nothing, DataError when no document is long enough.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        batch: int,
        seq: int,
        seed: int,
        accumulate: int = 1,
        split: Split = "train",
        eval_fraction: float = 0.01,
    ) -> None:
        check_numbers(batch, seq, split, eval_fraction)
        if accumulate < 1:
            raise UsageError(f"accumulate is {accumulate}; it must be at least 1")
        self.batch, self.seq, self.seed, self.split, self.accumulate = batch, seq, seed, split, accumulate
        self._tokens = tokens.tokens
        documents = _Documents.of(tokens, seq)
        chosen = documents.split(split, eval_fraction)
        self._starts = documents.row_starts(chosen)
        self._order: tuple[int, list[int]] | None = None
        """Of the epoch that was asked for last."""
        self.description = documents.description(chosen)
        """What a row is and what of the data they are, in one line."""

    def __len__(self) -> int:
        """Rows of this split: those of one epoch."""
        return len(self._starts)

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets) of that step, int64, each (batch, seq) and contiguous."""
        first = ((step - _FIRST_STEP[self.split]) * self.accumulate + microbatch) * self.batch
        return windows(self._tokens, [self._start(first + row) for row in range(self.batch)], self.seq)

    def _start(self, number: int) -> int:
        """Where the row lies that comes after `number` others."""
        epoch, position = divmod(number, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._shuffled(epoch))
        return int(self._starts[self._order[1][position]])

    def _shuffled(self, epoch: int) -> list[int]:
        """By a hash of each row's number, which is the same with any version of any library."""

        def drawn(row: int) -> bytes:
            return hashlib.blake2b(f"{self.seed}/{self.split}/{epoch}/{row}".encode(), digest_size=16).digest()

        return sorted(range(len(self)), key=drawn)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Documents:
    """Where each document begins, how many tokens it has beside its end, and how many rows that makes."""

    seq: int
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tokens: TokenFile, seq: int) -> _Documents:
        ends = tokens.ends()
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
        return cls(seq=seq, starts=starts, lengths=ends - starts)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        return self.lengths // self.seq

    def split(self, split: Split, eval_fraction: float) -> npt.NDArray[np.int64]:
        """The documents of one split, ascending.

        Evaluation gets the documents of fewest rows, the last of them first, until they are `eval_fraction` of all rows;
        a training set of one document keeps it.

        Raises:
            DataError: no document is long enough, or the only one is training's.
        """
        (long_enough,) = np.nonzero(self.rows)
        if not len(long_enough):
            longest = int(self.lengths.max(initial=0))
            raise DataError(
                f"no document has {self.seq} tokens: the longest of {len(self.lengths)} has {longest}; shorten --seq, "
                f"give longer documents, or use --documents packed, whose rows run on from one into the next"
            )
        if len(long_enough) == 1 and split == "eval":
            raise DataError(
                f"only one document has {self.seq} tokens, and training has it; leave out --eval-every, shorten --seq or "
                f"give more data"
            )
        rows = self.rows[long_enough]
        by_rows = long_enough[np.lexsort((-long_enough, rows))]
        wanted = math.ceil(int(rows.sum()) * eval_fraction)
        held_out = int(np.searchsorted(np.cumsum(self.rows[by_rows]), wanted)) + 1 if wanted else 0
        held_out = min(held_out, len(long_enough) - 1)
        return np.sort(by_rows[:held_out] if split == "eval" else by_rows[held_out:])

    def row_starts(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rows = self.rows[chosen]
        within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)  # each row's number in its document
        starts: npt.NDArray[np.int64] = np.repeat(self.starts[chosen], rows) + self.seq * within
        return starts

    def description(self, chosen: npt.NDArray[np.int64]) -> str:
        rows, fit = int(self.rows[chosen].sum()), int((self.rows > 0).sum())
        used = rows * self.seq / max(int(self.lengths.sum()), 1)
        return (
            f"{format_tokens(self.seq)} tokens of one document; {fit:,} of {len(self.lengths):,} have as many, the longest "
            f"{int(self.lengths.max()):,}; an epoch is {rows:,} rows of {len(chosen):,} documents, {used:.0%} of all tokens"
        )
