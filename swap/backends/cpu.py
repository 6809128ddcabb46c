"""CPU backend: device memory is ordinary host memory, copies run on worker threads.

The host is its own compute stream: a compute event is done when it is recorded, and waiting for an event blocks the
host. Used for training on a CPU, where the disk is the tier that matters.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from typing import TYPE_CHECKING

import torch

from memo import forks
from memo.swap.backends.protocol import HostStamp, OneComputeStream, drop_frames, renewed
from memo.swap.memory.page_aligned import aligned_empty
from memo.swap.memory.slab import PageableSlab
from memo.threads import start_thread

if TYPE_CHECKING:
    from memo.swap.backends.protocol import Event, Timed


class Done:
    """Implements Timed as an event that is done already."""

    def query(self) -> bool:
        """Returns True."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""

    def interval_ns(self) -> tuple[int, int] | None:
        """Returns None: not measured."""
        return None

    def cancel(self) -> bool:
        """Returns False."""
        return False


_DONE = Done()


class HostEvent:
    """Implements Timed for an operation of a worker thread."""

    __slots__ = ("_done", "_error", "_forks", "_interval", "_lock", "_started")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._forks = forks.count()
        self._lock = threading.Lock()
        self._started = False
        self._error: BaseException | None = None
        self._interval: tuple[int, int] | None = None

    def query(self) -> bool:
        """Returns True once the operation is done, failed or cancelled."""
        return self._done.is_set()

    def synchronize(self) -> None:
        """Blocks until the operation is done; raises its failure, anew each time: else it would keep those who waited."""
        self.wait()
        if self._error is not None:
            raise renewed(self._error) from self._error.__cause__

    def wait(self) -> None:
        """Blocks until the operation is done; does not raise its failure."""
        if not self._done.is_set():
            forks.require_same(self._forks)
            self._done.wait()

    def interval_ns(self) -> tuple[int, int] | None:
        """Returns start and end of the operation; None before its end."""
        return self._interval

    def cancel(self) -> bool:
        """Cancels an operation that has not started."""
        if self._forks != forks.count():
            return False
        with self._lock:
            if self._started:
                return False
            self._started = True
        self._done.set()
        return True

    def start(self) -> bool:
        """Marks the operation as started, on the worker; False if it was cancelled."""
        with self._lock:
            if self._started:
                return False
            self._started = True
            return True

    def finish(self, begin_ns: int, error: BaseException | None = None) -> None:
        """Marks the operation as done or failed; called once, on the worker."""
        self._interval = (begin_ns, time.monotonic_ns())
        drop_frames(error)
        self._error = error
        self._done.set()


_Operation = tuple[HostEvent, torch.Tensor, torch.Tensor, "list[Event]"]


class ThreadStream:
    """Implements CopyStream with one worker thread, started at the first copy."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._forks = forks.count()
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._waits: list[Event] = []
        self._thread: threading.Thread | None = None
        self._last: HostEvent | None = None

    def wait(self, event: Event) -> None:
        """Orders later copies after `event`."""
        if not event.query():
            self._waits.append(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> HostEvent:
        """Queues a copy."""
        forks.require_same(self._forks)
        if self._thread is None or self._thread.ident is None:
            self._thread = threading.Thread(target=self._work, name=f"memo-{self._name}", daemon=True)
            start_thread(self._thread)
        event = HostEvent()
        self._queue.put((event, target, source, self._waits))
        self._waits = []
        self._last = event
        return event

    def synchronize(self) -> None:
        """Blocks until the last copy is done."""
        if self._last is not None:
            self._last.wait()

    def _work(self) -> None:
        while (operation := self._queue.get()) is not None:
            event, target, source, waits = operation
            begin = time.monotonic_ns()
            try:
                for other in waits:
                    other.synchronize()
                if event.start():
                    begin = time.monotonic_ns()
                    self._move(target, source)
                    event.finish(begin)
            except BaseException as error:
                event.finish(begin, error)
            del operation, event, target, source, waits  # this thread must not keep the buffers alive

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # ctypes releases the interpreter lock; torch's own copy would occupy the compute threads.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def close(self) -> None:
        """Completes the queued copies and ends the thread."""
        if self._thread is not None and self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


class CpuBackend(OneComputeStream):
    """Implements Backend for the CPU, with worker threads in place of copy engines."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.d2h = ThreadStream("d2h")
        self.h2d = ThreadStream("h2d")

    def compute_event(self, stream: int | None = None) -> Timed:
        """Returns an event that is done."""
        return _DONE

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        """Blocks the calling thread until `event`."""
        event.synchronize()

    def would_block(self, event: Event) -> bool:
        """Returns False: the calling thread is the compute stream and must wait anyway."""
        return False

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates page-aligned memory."""
        return aligned_empty(nbytes)

    def host_slab(self, nbytes: int) -> PageableSlab:
        """Reserves addresses of pageable memory."""
        return PageableSlab(nbytes)

    def synchronize(self) -> None:
        """Blocks until no copy is in flight."""
        self.d2h.synchronize()
        self.h2d.synchronize()

    def stamp(self, stream: int | None = None) -> HostStamp:
        """Returns a stamp of the present time."""
        return HostStamp()

    def close(self) -> None:
        """Ends the copy threads."""
        self.d2h.close()
        self.h2d.close()
