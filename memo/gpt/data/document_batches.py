"""Batches whose rows lie within one document each, for `memo train --documents whole`.

Owns the choice of the rows and their order. A document is cut into rows of `seq` tokens from its start; a row's targets
reach one token further, the last row's to the end of the document. Documents shorter than `seq`, and the rest at a
document's end, are skipped and counted. Every row comes once per epoch, in an order that is a function of the seed and the
epoch, so there is no state to save. Evaluation has documents of its own.

    seq 4      a a a a a a a a a a .   b b b .   c c c c .
    rows       |------||------|                  |------|        of two documents; `b` and two tokens of `a` are skipped
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

_FIRST_STEP: dict[Split, int] = {"train": 1, "eval": 0}
"""First step of each split, with which its first epoch begins."""


class DocumentBatches:
    """Batches of rows of `seq` tokens, each from one document.

    Args:
        tokens: the training set.
        batch: rows in a microbatch.
        seq: tokens in a row.
        seed: seed of the rows' order.
        accumulate: microbatches in a step, so that no row comes twice in an epoch.
        split: the part of the documents to draw from.
        eval_fraction: share of the rows that evaluation gets.

    Raises:
        UsageError: a number is out of range.
        DataError: no document is long enough.
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
        """Number and row order of the last used epoch."""
        self.description = documents.description(chosen)
        """One line about the rows and their share of the data, for the terminal."""

    def __len__(self) -> int:
        return len(self._starts)

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of a microbatch, each int64, (batch, seq), contiguous."""
        first = ((step - _FIRST_STEP[self.split]) * self.accumulate + microbatch) * self.batch
        return windows(self._tokens, [self._start(first + row) for row in range(self.batch)], self.seq)

    def _start(self, number: int) -> int:
        """First token of the row that comes after `number` others."""
        epoch, position = divmod(number, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._shuffled(epoch))
        return int(self._starts[self._order[1][position]])

    def _shuffled(self, epoch: int) -> list[int]:
        """Order of an epoch's rows by a hash of each row's number, the same with any library version."""

        def drawn(row: int) -> bytes:
            return hashlib.blake2b(f"{self.seed}/{self.split}/{epoch}/{row}".encode(), digest_size=16).digest()

        return sorted(range(len(self)), key=drawn)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Documents:
    """Documents of a training set: first token, length without the end token, and number of rows."""

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
        """Numbers of the documents of one split, ascending.

        Evaluation gets the documents with the fewest rows, the last of them first, until they have `eval_fraction` of all
        rows. A single document belongs to training.

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
