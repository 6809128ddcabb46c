"""Whether anything but operators changes memory while a layer runs: a kernel below the dispatcher that works in place.

What an operator gave is summed up, and again before the next one reads it. So a trial finds a kernel (Triton, NumPy, an
extension) that overwrites a copy, zeros or a buffer, of which the proof knows nothing. Not found: a kernel that changes no
bit in the trial, or leaves the sum of all words as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import torch

from memo.swap.identity import Identities
from memo.swap.origins import has_storage

__all__ = ["Contents"]


class Contents:
    """Of one run. Sums stay on the device until `were_changed` reads them back."""

    def __init__(self, device: torch.device) -> None:
        self._sums = Identities(brief=True)
        self._differ = torch.zeros((), dtype=torch.bool, device=device)

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operator has written these, or they are there when the run begins."""
        for tensor in tensors:
            if has_storage(tensor):
                self._sums[tensor.untyped_storage()] = _sum(tensor)

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operator is about to read these."""
        for tensor in tensors:
            if has_storage(tensor):
                known = self._sums.find(ref(tensor.untyped_storage()))
                if known is None:
                    self._sums[tensor.untyped_storage()] = _sum(tensor)
                else:
                    self._differ |= known != _sum(tensor)

    def were_changed(self) -> bool:
        """Something was read that was not as it had been left."""
        return not torch.equal(self._differ, torch.zeros_like(self._differ))


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Of the words of the tensor's storage."""
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    words = content.numel() // 8 * 8
    return content[:words].view(torch.int64).sum() + content[words:].sum()
