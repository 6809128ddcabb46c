"""A step's rows in other microbatches than those in which they are drawn.

Rows are drawn by step, microbatch and row, so a run that goes on with other microbatches would see other rows. With the
same number of rows in a step it sees the same ones, in the same order:

    drawn       | 0 1 2 3 | 4 5 6 7 |                   two microbatches of four rows
    regrouped   | 0 1 | 2 3 | 4 5 | 6 7 |               four of two
"""

from __future__ import annotations

from typing import Protocol

import torch


class _Drawn(Protocol):
    batch: int
    description: str

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]: ...


class RegroupedBatches:
    """Batches of `batch` rows, from those of another source.

    Args:
        drawn: the source.
        batch: rows in a microbatch.
    """

    def __init__(self, drawn: _Drawn, *, batch: int) -> None:
        self._drawn, self.batch = drawn, batch
        self.description = drawn.description
        """One line about the rows, for the terminal."""

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of a microbatch, each int64, (batch, seq), contiguous."""
        first, size = microbatch * self.batch, self._drawn.batch
        sources = range(first // size, -(-(first + self.batch) // size))
        tokens, targets = zip(*(self._drawn.at(step, source) for source in sources), strict=True)
        start = first - sources.start * size
        return tuple(torch.cat(rows)[start : start + self.batch].contiguous() for rows in (tokens, targets))  # type: ignore[return-value]
