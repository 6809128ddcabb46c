"""Pageable host slab, for devices that need no pinning: pages are taken from the system as they are touched.

Where host memory is the device, a slab's pages are part of the process's resident memory and count against the budget of
the host tier: `touched_slab_bytes` is what the device's count leaves out.
"""

from __future__ import annotations

import mmap
import weakref
from typing import TYPE_CHECKING

import torch

from memo.swap.memory.page_aligned import private_pages

if TYPE_CHECKING:
    from collections.abc import Callable


class PageableSlab:
    """A `memo.swap.backends.protocol.HostSlab` of `nbytes` addresses, usable at once.

    Raises:
        SwapError: the system refuses the mapping.
    """

    def __init__(self, nbytes: int) -> None:
        self._mapping = private_pages(nbytes)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.nbytes = 0
        self.touched_bytes = 0
        """End of the range that has been claimed since the slab was last shrunk; its pages are resident."""
        _slabs[self] = None

    def grow(self, nbytes: int) -> None:
        """Counts the first `nbytes` as taken."""
        self.nbytes = max(self.nbytes, nbytes)

    def wait(self, nbytes: int) -> None:
        """Counts the first `nbytes` as touched; every byte is usable at once."""
        self.touched_bytes = max(self.touched_bytes, nbytes)

    def shrink(self, nbytes: int) -> None:
        """Gives the pages beyond the first `nbytes` back to the system."""
        if nbytes < self.nbytes:
            self._mapping.madvise(mmap.MADV_DONTNEED, nbytes, self.nbytes - nbytes)
            self.nbytes = nbytes
            self.touched_bytes = min(self.touched_bytes, nbytes)

    def when_freed(self, call: Callable[[], None]) -> None:
        """Has `call` called once the mapping is gone."""
        weakref.finalize(self._mapping, call).atexit = False

    def close(self) -> None:
        """Ends the count of its bytes; the mapping goes with its last view."""
        _slabs.pop(self, None)


_slabs: weakref.WeakKeyDictionary[PageableSlab, None] = weakref.WeakKeyDictionary()
"""Iterated by `keyrefs`, which makes a list at once; a WeakSet cannot be iterated while other threads add to it."""


def touched_slab_bytes() -> int:
    """Bytes of this process's resident memory that pageable slabs take."""
    return sum(slab.touched_bytes for known in _slabs.keyrefs() if (slab := known()) is not None)
