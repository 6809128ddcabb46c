"""Detects in-place changes by kernels below the dispatcher (Triton, NumPy, an extension) while a layer runs.

Each storage's words are summed when an operator has written it, and again when an operator reads it or autograd saves it.
So a layer's first call finds a kernel that overwrites a copy, zeros or a buffer, which the log does not show. Not found: a
kernel that changes no bit in that call.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import torch

from memo.swap.generators import leaves_generators
from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import has_storage

__all__ = ["Checksums", "checksum"]

_COLUMNS = 4093
"""A prime: rows of the program's own tensors do not lie over each other."""
_PLACE = 0x1E3779B97F4A7C15
"""Odd, and far from the numbers that words have in common."""


class Checksums:
    """Checksums of the storages of one run. They stay on the device."""

    def __init__(self) -> None:
        self._sums = StorageMap(brief=True)

    @leaves_generators
    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sums tensors that an operator has written, or that are there when the run begins."""
        for tensor in tensors:
            if has_storage(tensor):
                self._sums[tensor.untyped_storage()] = checksum(tensor)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drops the sums of tensors that a collective is still writing."""
        for tensor in tensors:
            if has_storage(tensor):
                self._sums[tensor.untyped_storage()] = None

    @leaves_generators
    def differs(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Flag on the tensor's device: its sum is no longer the noted one. Where none was, notes it and returns None."""
        known = self._sums.find(ref(tensor.untyped_storage()))
        if known is None:
            self.note([tensor])
            return None
        differs: torch.Tensor = known != checksum(tensor)
        return differs


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
