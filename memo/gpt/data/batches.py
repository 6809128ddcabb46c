"""Batches of token windows, as a pure function of (seed, step, microbatch), without state to save.

Each row is a window of the tokens at a hashed position, so a resumed run sees the batches of an uninterrupted one, on any
machine and with any library version. Windows may cross document ends; document_batches.py has rows within one document. The
last part of the tokens is for evaluation only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from memo.errors import DataError, UsageError
from memo.gpt.data.token_file import TokenFile
from memo.units import format_tokens

Split = Literal["train", "eval"]


class Batches:
    """Batches of windows of `seq` tokens.

    Args:
        tokens: the training set.
        batch: rows in a microbatch.
        seq: tokens in a row.
        seed: seed of the windows' positions.
        split: the part of the tokens to draw from.
        eval_fraction: share of the tokens that evaluation gets, at the end.

    Raises:
        UsageError: a number is out of range.
        DataError: a window is longer than the data.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        batch: int,
        seq: int,
        seed: int,
        split: Split = "train",
        eval_fraction: float = 0.01,
    ) -> None:
        check_numbers(batch, seq, split, eval_fraction)
        window = seq + 1  # the last target is one past the last input
        held_out = max(math.ceil(len(tokens) * eval_fraction), window) if eval_fraction else 0
        boundary = len(tokens) - held_out
        if boundary < window:
            raise DataError(_too_long(seq, len(tokens), eval_fraction))
        first, last = (0, boundary) if split == "train" else (boundary, len(tokens))
        self.batch, self.seq, self.seed, self.split = batch, seq, seed, split
        self._tokens = tokens.tokens[first:last]
        self.description = f"{format_tokens(seq)} tokens anywhere in the text, across ends of documents"
        """One line about the rows, for the terminal."""

    def __len__(self) -> int:
        return len(self._tokens)

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of a microbatch, each int64, (batch, seq), contiguous."""
        return windows(self._tokens, [self._start(step, microbatch, row) for row in range(self.batch)], self.seq)

    def _start(self, step: int, microbatch: int, row: int) -> int:
        name = f"{self.seed}/{self.split}/{step}/{microbatch}/{row}"
        draw = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")
        return draw % (len(self._tokens) - self.seq)


def windows(
    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32], starts: Sequence[int], seq: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of `seq` tokens from each start, and the tokens that follow each token.

    Returns:
        Tokens and targets, each int64, (len(starts), seq), contiguous.
    """
    rows = np.empty((len(starts), seq + 1), dtype=np.int64)
    for row, start in enumerate(starts):
        rows[row] = tokens[start : start + seq + 1]
    both = torch.from_numpy(rows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def check_numbers(batch: int, seq: int, split: Split, eval_fraction: float) -> None:
    """Raises UsageError for a number out of range or an unknown split."""
    if batch < 1:
        raise UsageError(f"batch is {batch}; it must be at least 1")
    if seq < 1:
        raise UsageError(f"sequence length is {seq}; it must be at least 1")
    if split not in get_args(Split):
        raise UsageError(f"split is {split!r}; choose one of {', '.join(get_args(Split))}")
    if not 0.0 <= eval_fraction <= 0.5:
        raise UsageError(f"eval fraction is {eval_fraction}; it must be between 0 and 0.5")
    if split == "eval" and not eval_fraction:
        raise UsageError("an eval split needs an eval fraction above 0")


def _too_long(seq: int, tokens: int, eval_fraction: float) -> str:
    longest = tokens // 2 - 1 if eval_fraction else tokens - 1
    also = " (training and evaluation each need one)" if eval_fraction else ""
    if longest < 1:
        return f"the data holds {tokens} tokens, too few to train on; give more data"
    return (
        f"a sequence of {seq} tokens is longer than the data allows: it holds {tokens} tokens, so the longest possible"
        f" is {longest}{also}; shorten --seq or give more data"
    )
