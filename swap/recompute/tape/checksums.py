"""Detects in-place changes by kernels below the dispatcher (Triton, NumPy, an extension) while a layer runs.

Each storage's words are summed when an operator has written it, and again when an operator reads it or autograd saves it.
So a layer's first call finds a kernel that overwrites a copy, zeros or a buffer, which the log does not show. Not found: a
kernel that changes no bit in that call.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import torch

from memo.swap.checksum import checksum
from memo.swap.generators import leaves_generators
from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import has_storage


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
