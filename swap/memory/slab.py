"""Pageable host slab, for devices that need no page-locking: pages are taken from the system as they are touched."""

from __future__ import annotations

import mmap

import torch

from memo.swap.memory.page_aligned import private_pages

__all__ = ["PageableSlab"]


class PageableSlab:
    """A `memo.swap.backends.protocol.HostSlab` of `nbytes` addresses, usable at once.

    Raises:
        SwapError: the system refuses the mapping.
    """

    def __init__(self, nbytes: int) -> None:
        self._mapping = private_pages(nbytes)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Counts the first `nbytes` as taken."""
        self.nbytes = max(self.nbytes, nbytes)

    def wait(self, nbytes: int) -> None:
        """Does nothing: every byte is usable at once."""

    def shrink(self, nbytes: int) -> None:
        """Gives the pages beyond the first `nbytes` back to the system."""
        if nbytes < self.nbytes:
            self._mapping.madvise(mmap.MADV_DONTNEED, nbytes, self.nbytes - nbytes)
            self.nbytes = nbytes

    def close(self) -> None:
        """Does nothing: the mapping goes with its last view."""
