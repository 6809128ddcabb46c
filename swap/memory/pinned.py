"""Pinned host memory, which a GPU reads and writes at the full rate of its link.

torch's pinned allocator rounds to a power of two (1.78 times the request, measured) and never gives memory back. Here memory
is a private mapping of which exactly the requested pages are locked in place. A `PinnedSlab` is locked from its start, piece
by piece in the background, and grows in place: nothing is locked twice. Page faults are most of the cost (on one virtual
machine 1.1 to 1.4 s per GiB, and at most 0.1 s to lock the pages then), so several threads fault pages in.

A copy may not span two registrations: `copy_pieces` divides it at their borders. One registration for all is not possible:
drivers from 580 on refuse 512 GiB in one call (LMCache/LMCache#5177).

Forked processes, such as a data loader's workers, do not get this memory: the kernel would copy all of its pages at the
fork, since they are locked.
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
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from memo.errors import SwapError
from memo.swap.memory.numa import prefer_node
from memo.swap.memory.page_aligned import PAGE_BYTES, private_pages, whole_pages
from memo.threads import start_thread
from memo.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context, as torch's own pinned memory
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since Linux 5.14; Python has no name for it
_FAULTED_BYTES = 64 << 20
"""Bytes that a thread faults in by one call; between calls it checks whether the slab is closed."""
_FAULTING_THREADS = min(4, os.cpu_count() or 1)


class _LockingThreads(threading.local):
    """Marks the threads that lock pages: a garbage collection in one of them may close a slab, which must not join them."""

    is_marked = False

    def mark(self) -> None:
        """Marks the calling thread."""
        self.is_marked = True


_locking_threads = _LockingThreads()
_log = logging.getLogger("memo")
_starts: list[int] = []  # addresses at which registrations begin, sorted
_starts_lock = threading.RLock()  # of changes; a garbage collection may unlock pages meanwhile


def empty_pinned(nbytes: int, *, node: int | None = None) -> torch.Tensor:
    """Returns pinned host memory as a uint8 tensor of `nbytes`; it is unlocked when its storage dies.

    Args:
        nbytes: bytes; whole pages are locked.
        node: NUMA node that the pages should come from, if the kernel agrees.

    Raises:
        SwapError: the system refuses to map or to lock the pages.
    """
    pages, memory = _Pages.mapped(nbytes, node)
    pages.lock(0, nbytes)
    return memory


def copy_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Issues the copy of all of `source` on the current stream, in one piece for each registration that it touches.

    Args:
        target: uint8 tensor.
        source: uint8 tensor of the same size; at most one of the two is pinned memory of this module.
    """
    borders = _borders(target) or _borders(source)  # the other one is the device's
    if not borders:
        target.copy_(source, non_blocking=True)
        return
    for start, stop in itertools.pairwise((0, *borders, source.numel())):
        target[start:stop].copy_(source[start:stop], non_blocking=True)


def _borders(block: torch.Tensor) -> list[int]:
    """Offsets within a block of bytes at which another registration begins."""
    address = block.data_ptr()
    starts = _starts.copy()  # locking threads, and whoever frees locked memory, change it meanwhile
    first = bisect.bisect_right(starts, address)
    last = bisect.bisect_left(starts, address + block.numel())
    return [start - address for start in starts[first:last]]


class PinnedSlab:
    """A `memo.swap.backends.protocol.HostSlab` whose first bytes are pinned in the background, as far as `grow` asks.

    Args:
        nbytes: size of the address range, of which nothing is locked yet.
        device: the GPU whose context the locking thread uses; a context on another GPU would take its memory.
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
        self._thread: threading.Thread | None = None  # the running or latest locking thread
        self._error: BaseException | None = None
        self._closed = False

    def grow(self, nbytes: int) -> None:
        """Begins to lock up to the first `nbytes` in the background; does nothing once closed."""
        with self._changed:
            if nbytes <= self.nbytes or self._closed:
                return
            self.nbytes = nbytes
            self._error = None
            if not self._locking:
                before, self._locking = self._thread, True
                self._thread = threading.Thread(target=self._work, args=(before,), name="memo-pin", daemon=True)
                try:
                    start_thread(self._thread)
                except BaseException as error:
                    if self._thread.ident is None:
                        self._thread, self._locking, self.nbytes = before, False, self._ready
                    if not isinstance(error, SwapError):
                        raise
                    self._error = error

    def wait(self, nbytes: int) -> None:
        """Returns when the first `nbytes` are locked.

        Raises:
            SwapError: the system refused some of them, or the slab is closed; it is then as large as what is locked.
        """
        if nbytes <= self._ready:
            return
        with self._changed:
            self._changed.wait_for(lambda: nbytes <= self._ready or not self._locking)
            if nbytes <= self._ready:
                return
            error, self._error = self._error, None
            try:
                raise error or SwapError("host memory was requested after the manager was closed")
            finally:
                del error  # a cycle with this frame would keep the callers' tensors

    def shrink(self, nbytes: int) -> None:
        """Unlocks and gives back whole registrations beyond the first `nbytes`, once the locking thread is idle."""
        with self._changed:
            self.nbytes = min(self.nbytes, max(nbytes, self._ready))  # the thread finishes its current piece
            self._changed.wait_for(lambda: not self._locking)
            self.nbytes = self._ready = self._pages.unlock_beyond(nbytes)

    def when_freed(self, call: Callable[[], None]) -> None:
        """Has `call` called once the pages are unlocked and the mapping is gone."""
        self._pages.when_freed(call)

    def close(self) -> None:
        """Ends the locking thread; locked memory is unlocked when its storage dies. Idempotent."""
        with self._changed:
            self._closed = True
        if self._thread is not None and not _locking_threads.is_marked:
            self._thread.join()
        self.nbytes = self._ready

    def _work(self, before: threading.Thread | None) -> None:
        _locking_threads.mark()
        if before is not None:
            before.join()  # it has nothing left to lock
        begin, first = time.monotonic(), self._ready
        try:
            faulting = ThreadPoolExecutor(_FAULTING_THREADS, "memo-fault", initializer=_locking_threads.mark)
            with torch.cuda.device(self._device), faulting as threads:
                while (piece := self._next_piece()) is not None:
                    self._lock(*piece, threads)
        except BaseException as raised:
            with self._changed:
                self.nbytes, self._error = self._ready, raised
                self._end()
        took = format_duration(time.monotonic() - begin)
        _log.info("pinned %s of host memory in %s", format_bytes(self._ready - first), took)

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
            self._pages.fault_in(start, min(stop, start + _FAULTED_BYTES))

    def _end(self) -> None:
        """Marks the locking thread as idle and wakes the waiting ones; called with the condition held."""
        self._locking = False
        self._changed.notify_all()


class _Pages:
    """A private mapping and its pinned ranges, which are unlocked before it is unmapped."""

    def __init__(self, mapping: mmap.mmap, address: int) -> None:
        self._mapping = mapping
        self._address = address
        self._locked: list[tuple[int, int]] = []  # in order of address

    @classmethod
    def mapped(cls, nbytes: int, node: int | None) -> tuple[_Pages, torch.Tensor]:
        """Maps pages; returns them with a tensor over them, which unlocks all when its storage dies."""
        mapping = private_pages(nbytes)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        address = memory.data_ptr()
        with contextlib.suppress(OSError):  # some sandboxes do not implement it
            mapping.madvise(mmap.MADV_DONTFORK)
        if node is not None:
            prefer_node(address, nbytes, node)  # before the pages exist
        pages = cls(mapping, address)
        weakref.finalize(memory.untyped_storage(), pages.unlock_beyond, 0).atexit = False
        return pages, memory

    def when_freed(self, call: Callable[[], None]) -> None:
        """Has `call` called once the mapping is gone, which its locked ranges outlive in no case."""
        weakref.finalize(self._mapping, call).atexit = False

    def fault_in(self, start: int, stop: int) -> None:
        """Faults in the pages of a range that is not locked yet.

        Raises:
            SwapError: the system's memory is exhausted.
        """
        libc = ctypes.CDLL(None, use_errno=True)  # releases the interpreter lock, as mmap.madvise does not
        address, nbytes = ctypes.c_void_p(self._address + start), ctypes.c_size_t(stop - start)
        if libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() == errno.ENOMEM:
            raise SwapError(
                f"the system has no {format_bytes(stop - start)} of host memory left; lower the host budget"
            )
        torch.frombuffer(self._mapping, dtype=torch.uint8)[start:stop:PAGE_BYTES] = 0  # an older kernel

    def lock(self, start: int, stop: int) -> None:
        """Pins a range as one registration.

        Raises:
            SwapError: the driver refuses; nothing is locked.
        """
        address, nbytes = self._address + start, stop - start
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
        if code != 0:
            _clear_cuda_error()
            raise SwapError(
                f"cannot pin {format_bytes(nbytes)} of host memory beside {format_bytes(start)} locked already "
                f"(CUDA error {code}); "
                f"lower the host budget (containers and WSL limit it; ulimit -l does not)"
            )
        self._locked.append((start, stop))
        with _starts_lock:
            bisect.insort(_starts, address)

    def unlock_beyond(self, nbytes: int) -> int:
        """Unlocks and gives back the ranges that begin at `nbytes` or later; returns the end of those that stay."""
        while self._locked and self._locked[-1][0] >= nbytes:
            start, stop = self._locked.pop()
            with _starts_lock:
                _starts.remove(self._address + start)
            torch.cuda.cudart().cudaHostUnregister(self._address + start)
            self._mapping.madvise(mmap.MADV_DONTNEED, start, whole_pages(stop - start))
        return self._locked[-1][1] if self._locked else 0


def _clear_cuda_error() -> None:
    """Clears the CUDA runtime's last error by a kernel of ours; the program's next kernel would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
