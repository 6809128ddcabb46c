"""Compares recomputed with saved tensors, in pieces, so that a trial's memory does not grow with them.

Both are dense rows of bytes. The first pass compares bits, and reads one verdict a tensor back to the host. Only where
bits differ a second pass measures how far the numbers are apart, and reads that back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.swap.token_levels import COMPARED

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["have_same_bits", "relative_difference"]

_PIECE = COMPARED
"""Numbers that are compared at once, in double precision. Of bits it is eight times as many words, or bytes."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two blocks of bytes are equal: uint8, (rows, bytes), contiguous in the last dimension."""
    differ = torch.zeros((), dtype=torch.bool, device=one.device)
    begin_at_words = not any(int(block.storage_offset()) % 8 for block in (one, other))
    words = one.size(1) // 8 * 8 if one.size(0) == 1 and begin_at_words else 0
    if words:
        ours, theirs = (block[0, :words].view(torch.int64)[None] for block in (one, other))
        for our, their in _pieces(ours, theirs, 8 * _PIECE):
            differ |= (our != their).any()
    for our, their in _pieces(one[:, words:], other[:, words:], 8 * _PIECE):
        differ |= (our != their).any()
    return torch.equal(differ, torch.zeros_like(differ))  # which tensors without bytes answer too


def relative_difference(again: torch.Tensor, saved: torch.Tensor) -> float:
    """Root mean square of the difference, over that of the saved numbers. Both are (rows, numbers) of one floating type.

    Numbers of equal bits do not differ, NaN and infinity included; NaN and infinity add nothing to the scale. The result is
    NaN or infinite where a number is not finite in one of the two alone.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=saved.device)
    for ours, theirs in _pieces(again, saved, _PIECE):
        sums += _squares(ours, theirs)
    return float((sums[0] / sums[1]).sqrt().item())


def _squares(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Sums of squares of the difference and of the saved numbers. Takes 17 bytes an element (`comparing_nbytes`)."""
    bits = _BITS[theirs.itemsize]
    same = ours.view(bits) == theirs.view(bits)
    scale = theirs.double()
    off = ours.to(torch.float64, copy=True).sub_(scale).masked_fill_(same, 0.0).square_().sum()
    return torch.stack([off, torch.nan_to_num(scale, nan=0.0, posinf=0.0, neginf=0.0).square_().sum()])


def _pieces(one: torch.Tensor, other: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views of at most so many elements."""
    rows, columns = one.shape
    height = max(1, most // max(1, columns))
    for top in range(0, rows, height):
        for left in range(0, columns, most):
            part = slice(top, top + height), slice(left, left + most)
            yield one[part], other[part]
