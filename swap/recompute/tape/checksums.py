"""Detects in-place changes by kernels below the dispatcher (Triton, NumPy, an extension) while a layer runs.

Each tensor's words are summed when an operator has written it, and again before the next operator reads it. So a trial
finds a kernel that overwrites a copy, zeros or a buffer, of which the proof knows nothing. Not found: a kernel that
changes no bit in the trial, or leaves the sum of all words as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import torch

from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import has_storage

__all__ = ["Checksums", "checksum"]


class Checksums:
    """Checksums of the storages of one run. They stay on the device until `differ` reads the verdict back."""

    def __init__(self, device: torch.device) -> None:
        self._sums = StorageMap(brief=True)
        self._changed = torch.zeros((), dtype=torch.bool, device=device)

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

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Compares the sums of tensors that an operator is about to read; sums those that it has not seen."""
        for tensor in tensors:
            if has_storage(tensor):
                known = self._sums.find(ref(tensor.untyped_storage()))
                if known is None:
                    self._sums[tensor.untyped_storage()] = checksum(tensor)
                else:
                    self._changed |= known != checksum(tensor)

    def differs(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Whether the tensor's sum is no longer the noted one, as a flag on its device; None where none is noted."""
        known = self._sums.find(ref(tensor.untyped_storage()))
        if known is None:
            self.note([tensor])
            return None
        differs: torch.Tensor = known != checksum(tensor)
        return differs

    def differ(self) -> bool:
        """True if a tensor was read whose sum had changed since it was written. Waits for the device."""
        return not torch.equal(self._changed, torch.zeros_like(self._changed))


def checksum(tensor: torch.Tensor, nbytes: int | None = None) -> torch.Tensor:
    """The sum of the 64-bit words of the tensor's storage, or its first `nbytes`, modulo 2^64, plus the last bytes."""
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())[:nbytes]
    words = content.numel() // 8 * 8
    return content[:words].view(torch.int64).sum() + content[words:].sum()
