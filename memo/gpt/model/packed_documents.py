"""Packed documents: boundaries of the documents in a batch, and the position of each token in its document.

A row of a batch is a window of the training set and may cross document ends. With spans, attention stays within one document
and positions restart in each.

    tokens     a a a . b b . c c        `.` ends a document and belongs to it
    lengths    4       3     2          over all rows, one after another; no span crosses from row to row
    positions  0 1 2 3 0 1 2 0 1
"""

from __future__ import annotations

import dataclasses
import itertools

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DocumentSpans:
    """Documents of one batch."""

    lengths: tuple[int, ...]
    """Number of tokens of each document, over all rows."""
    positions: torch.Tensor
    """Position of each token in its document, int64, (batch, tokens)."""
    starts: torch.Tensor
    """First token of each document among all tokens, and the number of tokens: int32, (documents + 1,)."""

    @classmethod
    def of(cls, tokens: torch.Tensor, end_of_document: int) -> DocumentSpans:
        """Finds the documents in `tokens` (batch, tokens). Synchronises with the device to learn their number."""
        ends = tokens == end_of_document
        ends[:, -1] = True  # the last document of a row ends with it
        last = ends.flatten().nonzero().flatten()
        starts = torch.cat([last.new_zeros(1), last + 1])
        lengths = starts.diff()
        begins = starts[:-1].repeat_interleave(lengths, output_size=tokens.numel())
        positions = torch.arange(tokens.numel(), device=tokens.device) - begins
        return cls(
            lengths=tuple(lengths.tolist()), positions=positions.view(tokens.shape), starts=starts.to(torch.int32)
        )

    def of_rows(self, first: int, rows: int) -> DocumentSpans:
        """The documents of `rows` rows from `first` on."""
        whole = sum(self.lengths) // len(self.positions)  # positions may be those of a shard of the tokens
        ends = list(itertools.accumulate(self.lengths, initial=0))
        begin, end = ends.index(first * whole), ends.index((first + rows) * whole)
        return DocumentSpans(
            lengths=self.lengths[begin:end],
            positions=self.positions[first : first + rows],
            starts=self.starts[begin : end + 1] - first * whole,
        )

    @property
    def longest(self) -> int:
        """Number of tokens of the longest document."""
        return max(self.lengths)
