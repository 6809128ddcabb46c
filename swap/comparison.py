"""Compares what a trial recomputed with what was saved, in pieces: a trial needs no room that grows with the tensors.

Both are dense rows of bytes. Whether all bits are the same is asked first, and read back to the host once a tensor; only
where they are not does a second pass say how far the numbers are apart, which is read back once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.swap.levels import COMPARED

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["have_same_bits", "relative_difference"]

_PIECE = COMPARED
"""Elements of the numbers that are compared at once, in double precision; of bits, as many times eight bytes."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two blocks of bytes are the same, (rows, bytes), contiguous in the last dimension."""
    differ = torch.zeros((), dtype=torch.bool, device=one.device)
    for ours, theirs in _pieces(one, other, 8 * _PIECE):
        differ |= (ours != theirs).any()
    return torch.equal(differ, torch.zeros_like(differ))  # which tensors without bytes answer too


def relative_difference(again: torch.Tensor, saved: torch.Tensor) -> float:
    """Root mean square of the difference, over that of the saved numbers. Both are (rows, numbers) of one floating type.

    Numbers of the same bits do not differ, also where they are none or infinite, and such ones count nothing towards the
    scale. Infinite or no number where others than those are not finite.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=saved.device)
    for ours, theirs in _pieces(again, saved, _PIECE):
        sums += _squares(ours, theirs)
    return float((sums[0] / sums[1]).sqrt().item())


def _squares(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Of the difference and of the numbers, summed: 17 bytes an element stand meanwhile (levels.comparing_nbytes)."""
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
