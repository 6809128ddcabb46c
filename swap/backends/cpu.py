"""The CPU backend: "device" memory is ordinary memory, copies run on worker threads.

The host is its own compute stream, so a compute event is done when it is taken and waiting for one blocks the host.
Used in production on CPU, where the tier that matters is the disk.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from typing import TYPE_CHECKING

import torch

from memo.swap.backends.protocol import HostStamp, OneComputeStream
from memo.swap.memory.page_aligned import aligned_empty
from memo.swap.memory.slab import PageableSlab

if TYPE_CHECKING:
    from memo.swap.backends.protocol import Event, Timed

__all__ = ["CpuBackend", "Done", "HostEvent", "ThreadStream"]


class Done:
    """An event in the past."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False


_DONE = Done()


class HostEvent:
    """The end of an operation that a worker thread runs."""

    __slots__ = ("_done", "_error", "_interval", "_lock", "_started")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._started = False
        self._error: BaseException | None = None
        self._interval: tuple[int, int] | None = None

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Blocks until then, whatever came of it."""
        self._done.wait()

    def interval_ns(self) -> tuple[int, int] | None:
        return self._interval

    def cancel(self) -> bool:
        with self._lock:
            if self._started:
                return False
            self._started = True
        self._done.set()
        return True

    def start(self) -> bool:
        """Called by the worker: True if it is to run the operation, False if that was cancelled."""
        with self._lock:
            if self._started:
                return False
            self._started = True
            return True

    def finish(self, begin_ns: int, error: BaseException | None = None) -> None:
        """Called by the worker, once."""
        self._interval = (begin_ns, time.monotonic_ns())
        self._error = error
        self._done.set()


_Operation = tuple[HostEvent, torch.Tensor, torch.Tensor, "list[Event]"]


class ThreadStream:
    """Copies in order on one thread, started at the first copy."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._waits: list[Event] = []
        self._thread: threading.Thread | None = None
        self._last: HostEvent | None = None

    def wait(self, event: Event) -> None:
        if not event.query():
            self._waits.append(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> HostEvent:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"memo-{self._name}", daemon=True)
            self._thread.start()
        event = HostEvent()
        self._queue.put((event, target, source, self._waits))
        self._waits = []
        self._last = event
        return event

    def synchronize(self) -> None:
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
            del operation, event, target, source, waits  # the buffers' lives are not this thread's

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # A foreign call, so the interpreter runs on; torch's own copy would take the compute threads.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


class CpuBackend(OneComputeStream):
    """Worker threads in place of copy engines."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.d2h = ThreadStream("d2h")
        self.h2d = ThreadStream("h2d")

    def compute_event(self, stream: int | None = None) -> Timed:
        return _DONE

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        event.synchronize()

    def host_waits(self, event: Event) -> bool:
        return False  # the host is the compute stream

    def empty(self, nbytes: int) -> torch.Tensor:
        return aligned_empty(nbytes)

    def host_slab(self, nbytes: int) -> PageableSlab:
        return PageableSlab(nbytes)

    def synchronize(self) -> None:
        self.d2h.synchronize()
        self.h2d.synchronize()

    def stamp(self, stream: int | None = None) -> HostStamp:
        return HostStamp()

    def close(self) -> None:
        self.d2h.close()
        self.h2d.close()
