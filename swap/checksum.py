"""Checksum of a storage, computed on its device; nobody waits for it."""

from __future__ import annotations

import torch

_COLUMNS = 4093
"""A prime: rows of the program's own tensors do not lie over each other."""
_PLACE = 0x1E3779B97F4A7C15
"""Odd, and far from the numbers that words have in common."""


def checksum(tensor: torch.Tensor, nbytes: int | None = None) -> torch.Tensor:
    """A number for the bytes of the tensor's storage, or its first `nbytes`, and their order.

    The storage's 64-bit words are summed along rows and columns of a table; what these sums, and what is left over, have at
    each place is mixed with the place.
    """
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())[:nbytes]
    words = content[: content.numel() // 8 * 8].view(torch.int64)
    parts = [words, content[8 * words.numel() :].long()]
    if words.numel() > _COLUMNS:
        table = words[: words.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS)
        parts = [table.sum(0), table.sum(1), words[table.numel() :], parts[1]]
    parts = [part for part in parts if part.numel()]
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else words
    mixed = torch.arange(mixed.numel(), device=tensor.device).mul_(_PLACE).add_(mixed)
    return (mixed >> 32).bitwise_xor_(mixed).mul_(mixed).sum()
