"""Page-locked host memory: what a GPU copies to and from at the full rate of its link.

torch's pinned allocator rounds to a power of two (1.78 times what was asked, measured) and never gives back. Here memory is
a private mapping whose pages are locked where they are, exactly as many as asked for. A `PinnedSlab` is locked from its
start, piece by piece and in the background, and grows in place: nothing is locked twice. The faults that make pages are most
of the cost (on one virtual machine 1.1 to 1.4 s per GiB, and at most 0.1 s to lock them then), so threads make them.

A copy may not span two registrations: `copy_pieces` divides it where one ends and the next begins. A single registration
would not do either: drivers from 580 on refuse 512 GiB in one call (LMCache/LMCache#5177).

Forked processes, as a data loader's workers, do not get this memory: the kernel would copy all of its pages at the fork,
since they are locked.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from memo.errors import SwapError
from memo.swap.memory.numa import prefer_node
from memo.swap.memory.page_aligned import PAGE_BYTES, private_pages, whole_pages
from memo.units import format_bytes, format_duration

__all__ = ["PinnedSlab", "copy_pieces", "page_locked"]

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context, as torch's own pinned memory
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14; Python has no name for it
_FAULTED_BYTES = 64 << 20
"""Bytes whose pages a thread makes in one call; between calls it looks whether the slab is closed."""
_FAULTING_THREADS = min(4, os.cpu_count() or 1)
_TOLD_BYTES = 4 << 30
"""Locking less than this is over too soon for a progress line."""


class _Own(threading.local):
    """Marks the threads that lock pages: a garbage collection in one of them may close a slab, which must not join them."""

    is_marked = False

    def mark(self) -> None:
        self.is_marked = True


_own = _Own()
_log = logging.getLogger("memo")
_starts: list[int] = []  # addresses at which registrations begin, sorted


def page_locked(nbytes: int, *, node: int | None = None) -> torch.Tensor:
    """Page-locked host memory of exactly `nbytes` rounded up to a page, on NUMA node `node` if the kernel agrees.

    Unlocked when its storage dies.

    Raises:
        SwapError: the system refuses to map or to lock the pages.
    """
    pages, memory = _Pages.mapped(nbytes, node)
    pages.lock(0, nbytes)
    return memory


def copy_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Issues the copy of all of `source` on the current stream, a piece for each registration that it touches."""
    cuts = _cuts(target) or _cuts(source)  # the other one is the device's
    if not cuts:
        target.copy_(source, non_blocking=True)
        return
    for start, stop in itertools.pairwise((0, *cuts, source.numel())):
        target[start:stop].copy_(source[start:stop], non_blocking=True)


def _cuts(block: torch.Tensor) -> list[int]:
    """The offsets within a block of bytes at which another registration begins."""
    address = block.data_ptr()
    first = bisect.bisect_right(_starts, address)
    last = bisect.bisect_left(_starts, address + block.numel())
    return [start - address for start in _starts[first:last]]


class PinnedSlab:
    """`nbytes` of addresses whose first bytes are page-locked in the background, as far as `grow` asks.

    Satisfies `memo.swap.backends.protocol.HostSlab`.

    Args:
        nbytes: addresses, of which none are locked yet.
        device: the GPU whose context the locking thread uses; on another one a context would take device memory.
        node: NUMA node that the pages should come from.
        piece_bytes: the most bytes of one registration.

    Raises:
        SwapError: the system refuses the addresses.
    """

    def __init__(
        self, nbytes: int, device: torch.device, *, node: int | None = None, piece_bytes: int = 1 << 30
    ) -> None:
        self._pages, self.memory = _Pages.mapped(nbytes, node)
        self._device = device
        self._piece_bytes = piece_bytes
        self.nbytes = 0
        self._ready = 0  # bytes that are locked
        self._changed = threading.Condition()
        self._locking = False
        self._thread: threading.Thread | None = None  # the one that locks, or the latest that did
        self._error: BaseException | None = None
        self._closed = False

    def grow(self, nbytes: int) -> None:
        with self._changed:
            if nbytes <= self.nbytes or self._closed:
                return
            self.nbytes = nbytes
            self._error = None
            if not self._locking:
                self._locking = True
                self._thread = threading.Thread(
                    target=self._work, args=(self._thread,), name="memo-page-lock", daemon=True
                )
                self._thread.start()

    def wait(self, nbytes: int) -> None:
        if nbytes <= self._ready:
            return
        with self._changed:
            self._changed.wait_for(lambda: nbytes <= self._ready or not self._locking)
            if nbytes <= self._ready:
                return
            error, self._error = self._error, None
            raise error or SwapError("host memory is asked for after memo was closed")

    def shrink(self, nbytes: int) -> None:
        with self._changed:
            self.nbytes = min(self.nbytes, max(nbytes, self._ready))  # what the thread is at comes to its end
            self._changed.wait_for(lambda: not self._locking)
            self.nbytes = self._ready = self._pages.unlock_beyond(nbytes)

    def close(self) -> None:
        with self._changed:
            self._closed = True
        if self._thread is not None and not _own.is_marked:
            self._thread.join()
        self.nbytes = self._ready

    def _work(self, before: threading.Thread | None) -> None:
        _own.mark()
        if before is not None:
            before.join()  # it has nothing more to lock
        progress, begin, first = _Progress(), time.monotonic(), self._ready
        try:
            faulting = ThreadPoolExecutor(_FAULTING_THREADS, "memo-fault", initializer=_own.mark)
            with torch.cuda.device(self._device), faulting as threads:
                while (piece := self._next_piece()) is not None:
                    self._lock(*piece, threads)
                    progress.show(self._ready - first, self.nbytes - first)
        except BaseException as raised:
            with self._changed:
                self.nbytes, self._error = self._ready, raised
                self._end()
        progress.end()
        took = format_duration(time.monotonic() - begin)
        _log.info("page-locked %s of host memory in %s", format_bytes(self._ready - first), took)

    def _next_piece(self) -> tuple[int, int] | None:
        with self._changed:
            if self._closed or self._ready >= self.nbytes:
                self._end()
                return None
            return self._ready, min(self.nbytes, self._ready + self._piece_bytes)

    def _lock(self, start: int, stop: int, threads: ThreadPoolExecutor) -> None:
        list(threads.map(self._fault, range(start, stop, _FAULTED_BYTES), itertools.repeat(stop)))
        if self._closed:
            return
        self._pages.lock(start, stop)
        with self._changed:
            self._ready = stop
            self._changed.notify_all()

    def _fault(self, start: int, stop: int) -> None:
        if not self._closed:
            self._pages.make(start, min(stop, start + _FAULTED_BYTES))

    def _end(self) -> None:
        """Ends the locking thread's work and wakes those who wait; called with the condition held."""
        self._locking = False
        self._changed.notify_all()


class _Pages:
    """A private mapping and its page-locked ranges, which are unlocked before it is unmapped."""

    def __init__(self, mapping: mmap.mmap, address: int) -> None:
        self._mapping = mapping
        self._address = address
        self._locked: list[tuple[int, int]] = []  # in order of address

    @classmethod
    def mapped(cls, nbytes: int, node: int | None) -> tuple[_Pages, torch.Tensor]:
        """Maps pages; returns them with a tensor over them, whose storage's death unlocks all."""
        mapping = private_pages(nbytes)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        address = memory.data_ptr()
        with contextlib.suppress(OSError):  # a sandbox's kernel that does not know it
            mapping.madvise(mmap.MADV_DONTFORK)
        if node is not None:
            prefer_node(address, nbytes, node)  # before the pages exist
        pages = cls(mapping, address)
        weakref.finalize(memory.untyped_storage(), pages.unlock_beyond, 0).atexit = False
        return pages, memory

    def make(self, start: int, stop: int) -> None:
        """Faults in the pages of a range that is not locked yet. Raises SwapError where memory is exhausted."""
        libc = ctypes.CDLL(None, use_errno=True)  # gives way to other threads, as mmap.madvise does not
        address, nbytes = ctypes.c_void_p(self._address + start), ctypes.c_size_t(stop - start)
        if libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() == errno.ENOMEM:
            raise SwapError(
                f"the system has no {format_bytes(stop - start)} of host memory left; lower the host budget"
            )
        np.frombuffer(self._mapping, dtype=np.uint8)[start:stop:PAGE_BYTES] = 0  # an older kernel

    def lock(self, start: int, stop: int) -> None:
        """Page-locks a range as one registration. Raises SwapError where the driver refuses."""
        address, nbytes = self._address + start, stop - start
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
        if code != 0:
            _forget_error()
            raise SwapError(
                f"cannot page-lock {format_bytes(nbytes)} of host memory beside {format_bytes(start)} locked already "
                f"(CUDA error {code}); "
                f"lower the host budget (containers and WSL limit it; ulimit -l does not)"
            )
        self._locked.append((start, stop))
        bisect.insort(_starts, address)

    def unlock_beyond(self, nbytes: int) -> int:
        """Unlocks and gives back the ranges that begin at `nbytes` or later; returns the end of those that stay."""
        while self._locked and self._locked[-1][0] >= nbytes:
            start, stop = self._locked.pop()
            _starts.remove(self._address + start)
            torch.cuda.cudart().cudaHostUnregister(self._address + start)
            self._mapping.madvise(mmap.MADV_DONTNEED, start, whole_pages(stop - start))
        return self._locked[-1][1] if self._locked else 0


class _Progress:
    """One line on a terminal's stderr, taken away at the end."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, done: int, wanted: int) -> None:
        if wanted >= _TOLD_BYTES and sys.stderr.isatty():
            self._shown = True
            print(f"\rmemo: page-locked {format_bytes(done)} of {format_bytes(wanted)}\x1b[K", end="", file=sys.stderr)

    def end(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _forget_error() -> None:
    """Clears the CUDA runtime's last error, which would be raised at the program's next kernel, by a kernel of ours."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
