"""Host memory that needs no page-locking, a HostSlab (`memo.swap.backends.protocol`): pages appear as they are touched."""

from __future__ import annotations

import mmap

import torch

from memo.swap.memory.page_aligned import private_pages

__all__ = ["PageableSlab"]


class PageableSlab:
    """`nbytes` of addresses, usable at once."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = private_pages(nbytes)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        self.nbytes = max(self.nbytes, nbytes)

    def wait(self, nbytes: int) -> None:
        return None

    def shrink(self, nbytes: int) -> None:
        if nbytes < self.nbytes:
            self._mapping.madvise(mmap.MADV_DONTNEED, nbytes, self.nbytes - nbytes)
            self.nbytes = nbytes

    def close(self) -> None:
        return None
