"""Interface between the engine and a device: copy streams, events, device and host memory (rule R10).

Three implementations: `memo.swap.backends.cuda` (CUDA streams), `memo.swap.backends.cpu` (worker threads), and
`race_checker` (deterministic schedules and vector clocks, for tests). The engine is the same above all three.

Every buffer that crosses this interface is a one-dimensional uint8 tensor. A copy stream runs its operations in issue
order. Different streams are ordered only by events: `CopyStream.wait` and `Backend.compute_wait`. Where a method takes
`stream: int | None`, None is the caller's compute stream.
"""

from __future__ import annotations

import contextlib
import copy
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch


class Event(Protocol):
    """Point in the order of a stream."""

    def query(self) -> bool:
        """Returns True once all work before the point is done. Never blocks, never raises."""

    def synchronize(self) -> None:
        """Blocks the calling host thread until the point is reached.

        Raises:
            MemoError: The operation before the point failed.
        """


class Timed(Event, Protocol):
    """Event at the end of one operation, with the operation's start and end time."""

    def interval_ns(self) -> tuple[int, int] | None:
        """Returns (start, end) in `time.monotonic_ns()`; None while it runs and where it is not measured."""

    def cancel(self) -> bool:
        """Cancels an operation that has not started; its event is then done. False where that is not possible."""


class CopyStream(Protocol):
    """Stream of copies, run in issue order."""

    def wait(self, event: Event) -> None:
        """Orders all later work of the stream after `event`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Timed:
        """Issues a copy of all of `source`; the caller keeps both buffers alive until the event is done."""


_Range = TypeVar("_Range")


class Disk(Protocol[_Range]):
    """Disk tier: reserved ranges, of a type of its own, written and read asynchronously (rule R9).

    Operations on different extents run in any order; `after` is the only ordering. The store keeps `source` and
    `target` alive until the event is done.
    """

    def reserve(self, nbytes: int) -> _Range | None:
        """Reserves at least `nbytes`; None when the budget is used up."""

    @property
    def refusal(self) -> str | None:
        """Why the file system gave no more, if it was that."""

    def release(self, extent: _Range) -> None:
        """Releases the range; no operation on it may be pending."""

    def write(self, extent: _Range, source: torch.Tensor, *, after: Sequence[Event] = ()) -> Timed:
        """Writes all of `source` to the start of `extent` once the events of `after` are done."""
        ...

    def read(self, extent: _Range, target: torch.Tensor, *, after: Sequence[Event] = ()) -> Timed:
        """Fills `target` from the start of `extent` once the events of `after` are done."""
        ...

    def close(self) -> None:
        """Waits for running operations, ends the threads and closes the files. Idempotent."""


class Stamp(Protocol):
    """Timed event of a compute stream."""

    def ns(self) -> int | None:
        """Returns the `time.monotonic_ns()` at which the stream passed it; None before that."""

    def synchronize(self) -> None:
        """Blocks the calling host thread until the stream has passed it."""


class HostStamp:
    """Implements Stamp with the host time of its construction, for devices whose clock is the host's."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = time.monotonic_ns()

    def ns(self) -> int:
        """Returns the time of construction."""
        return self.at

    def synchronize(self) -> None:
        """Returns at once."""


class HostSlab(Protocol):
    """Range of host addresses of which the first `nbytes` are backed by memory; grows and shrinks at its end."""

    @property
    def memory(self) -> torch.Tensor:
        """Whole range; bytes beyond those passed to `wait` must not be accessed."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated, or being allocated."""

    def grow(self, nbytes: int) -> None:
        """Starts to allocate at least the first `nbytes`; returns at once."""

    def wait(self, nbytes: int) -> None:
        """Waits until the first `nbytes` may be used.

        Raises:
            SwapError: The system refused some of them; the slab keeps what it got.
        """

    def shrink(self, nbytes: int) -> None:
        """Frees whole pieces beyond the first `nbytes`; nothing there may be in use."""

    def when_freed(self, call: Callable[[], None]) -> None:
        """Has `call` called, by any thread, once all of the memory is freed; not where the process ends."""

    def close(self) -> None:
        """Ends growth. The memory is freed with the last view of it. Idempotent."""


class Backend(Protocol):
    """One device: its memory, compute streams and copy streams."""

    @property
    def device(self) -> torch.device:
        """Device with its index."""
        ...

    @property
    def d2h(self) -> CopyStream:
        """Stream of device-to-host copies."""
        ...

    @property
    def h2d(self) -> CopyStream:
        """Stream of host-to-device copies."""
        ...

    def current_stream(self) -> int:
        """Returns the caller's compute stream, read at each call and never cached (R5). Equal numbers: same stream."""

    def saving_stream(self, source: torch.Tensor) -> int:
        """Returns the caller's compute stream, on which autograd saves `source`; ordered after `source`'s writer."""

    def stream_context(self, stream: int) -> AbstractContextManager[object]:
        """Returns a context in which `stream` is the caller's compute stream."""

    def is_capturing(self) -> bool:
        """Returns True while the caller's stream is captured into a graph: work issued now runs later, repeatedly."""

    def compute_event(self, stream: int | None = None) -> Timed:
        """Records an event at the current end of a compute stream."""

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        """Orders later work of a compute stream after `event`.

        Raises:
            MemoError: The event's operation failed, where that is known by now.
        """

    def is_past(self, event: Event) -> bool:
        """Returns True if the host knows without asking a device that `event` is done; no wait for it is needed then.

        Raises:
            MemoError: The event's operation failed.
        """

    def would_block(self, event: Event) -> bool:
        """Returns True if `compute_wait(event)` would block the calling thread, which could issue other work meanwhile.

        False where the device does the ordering, and where the calling thread is the compute stream and must wait
        anyway.
        """

    def compute_uses(self, buffer: torch.Tensor, stream: int | None = None, *, writes: bool = True) -> None:
        """Declares that a compute stream has just used `buffer` or is about to (`record_stream`).

        Once freed, the memory is reused only after all work that this stream has issued by then.
        """

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates device memory on the caller's compute stream."""

    def allocated_here(self, buffer: torch.Tensor) -> None:
        """Declares memory that the program allocated on the caller's compute stream, and has written there."""

    def host_slab(self, nbytes: int) -> HostSlab:
        """Reserves addresses for `nbytes` of host memory, pinned where the device has a bus to cross.

        Raises:
            SwapError: The system refuses them.
        """

    def synchronize(self) -> None:
        """Blocks the host until no copy is in flight."""

    def finish(self) -> None:
        """Blocks the host until the device has done all its work, that of compute streams too."""

    def now_ns(self) -> int:
        """Returns the clock of this device's host, on which stamps and intervals are."""

    @property
    def kernels(self) -> str:
        """Returns the type of device whose kernels run: "cuda" or "cpu"."""

    def stamp(self, stream: int | None = None) -> Stamp | None:
        """Records a stamp on a compute stream; None where times are not measured."""

    def begin_range(self, name: str) -> int:
        """Opens a range of the device's profiler (NVTX); returns its number for `end_range`."""

    def end_range(self, number: int) -> None:
        """Closes the range."""

    def close(self) -> None:
        """Ends the copy streams. Idempotent."""


class OneComputeStream:
    """Base of backends whose only compute stream is the calling thread: implements that part of Backend."""

    def current_stream(self) -> int:
        """Returns 0."""
        return 0

    def saving_stream(self, source: torch.Tensor) -> int:
        """Returns 0."""
        return 0

    def stream_context(self, stream: int) -> AbstractContextManager[object]:
        """Returns a context without effect."""
        return _NO_CONTEXT

    def is_capturing(self) -> bool:
        """Returns False."""
        return False

    def is_past(self, event: Event) -> bool:
        """Returns True for an event that is done; raises its failure."""
        if not event.query():
            return False
        event.synchronize()
        return True

    def compute_uses(self, buffer: torch.Tensor, stream: int | None = None, *, writes: bool = True) -> None:
        """Does nothing: the thread's own order suffices."""

    def allocated_here(self, buffer: torch.Tensor) -> None:
        """Does nothing, likewise."""

    @property
    def kernels(self) -> str:
        """Returns "cpu"."""
        return "cpu"

    def now_ns(self) -> int:
        """Returns `time.monotonic_ns()`."""
        return time.monotonic_ns()

    def finish(self) -> None:
        """Waits for the copies: the thread itself is the compute stream."""
        self.synchronize()

    def synchronize(self) -> None:
        """Blocks the host until no copy is in flight."""
        raise NotImplementedError

    def begin_range(self, name: str) -> int:
        """Does nothing: there is no profiler range."""
        return 0

    def end_range(self, number: int) -> None:
        """Does nothing."""


def drop_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an error and of its causes, whose frames keep tensors alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def renewed(error: BaseException) -> BaseException:
    """Returns an equal error without frames, whatever arguments its class is made with."""
    try:
        return copy.copy(error)
    except Exception:
        twin = type(error).__new__(type(error), *error.args)
        vars(twin).update(vars(error))
        return twin


_NO_CONTEXT = contextlib.nullcontext()
