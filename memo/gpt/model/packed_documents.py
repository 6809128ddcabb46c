"""Documents packed into rows: where each begins and ends, and the position of every token in its own.

A row of a batch is a window of the training set and crosses ends of documents. With spans, attention sees the tokens of
one document alone and positions begin anew at each.

    tokens     a a a . b b . c c        `.` ends a document and belongs to it
    lengths    4       3     2          the rows of a batch one after the other: no span crosses from row to row
    positions  0 1 2 3 0 1 2 0 1
"""

from __future__ import annotations

import dataclasses

import torch

__all__ = ["DocumentSpans"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DocumentSpans:
    """The documents of one batch."""

    lengths: tuple[int, ...]
    """Tokens of each, over all rows."""
    positions: torch.Tensor
    """(batch, tokens), int64."""
    starts: torch.Tensor
    """Where each begins among all tokens, and their number: int32, one more than there are documents."""

    @classmethod
    def of(cls, tokens: torch.Tensor, end_of_document: int) -> DocumentSpans:
        """The documents in `tokens` (batch, tokens). Waits for the device, since their number is a shape."""
        ends = tokens == end_of_document
        ends[:, -1] = True  # the last of a row goes on in no other
        last = ends.flatten().nonzero().flatten()
        starts = torch.cat([last.new_zeros(1), last + 1])
        lengths = starts.diff()
        begins = starts[:-1].repeat_interleave(lengths, output_size=tokens.numel())
        positions = torch.arange(tokens.numel(), device=tokens.device) - begins
        return cls(
            lengths=tuple(lengths.tolist()), positions=positions.view(tokens.shape), starts=starts.to(torch.int32)
        )

    @property
    def longest(self) -> int:
        return max(self.lengths)
