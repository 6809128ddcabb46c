"""Interface between the engine and a device: copy streams, events that order, memory of each kind (rule R10).

Three implementations: `memo.swap.backends.cuda` (CUDA streams), `memo.swap.backends.cpu` (worker threads), and
`race_checker` (deterministic schedules and vector clocks, for tests). The engine is the same above all three.

Every buffer that crosses this interface is a one-dimensional uint8 tensor. A copy stream runs its operations in the
order they were issued. Different streams are ordered only by events: `CopyStream.wait` and `Backend.compute_wait`.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch

__all__ = [
    "Backend",
    "CopyStream",
    "Disk",
    "Event",
    "Extent",
    "HostSlab",
    "HostStamp",
    "OneComputeStream",
    "Stamp",
    "Timed",
]


class Event(Protocol):
    """A point in a stream's order."""

    def query(self) -> bool:
        """True once everything before the point is done. Never blocks, never raises."""

    def synchronize(self) -> None:
        """Blocks the calling host thread until then; raises the MemoError of the operation that failed, if one did."""


class Timed(Event, Protocol):
    """An event at the end of one operation that knows when the operation ran."""

    def interval_ns(self) -> tuple[int, int] | None:
        """(start, end) as `time.monotonic_ns()` readings; None while it runs or where it was not measured."""

    def cancel(self) -> bool:
        """True if the operation had not begun and never will; the event is then done. False where that cannot be."""


class CopyStream(Protocol):
    """A lane that copies in order."""

    def wait(self, event: Event) -> None:
        """Everything issued later runs after `event`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Timed:
        """Issues a copy of all of `source`; the caller keeps both buffers alive until the event is done."""


class Extent(Protocol):
    """A reserved range of the disk tier."""

    @property
    def nbytes(self) -> int: ...


class Disk(Protocol):
    """The disk tier: reserved ranges, written and read by threads of its own (rule R9).

    Operations on different extents run in any order; `after` is the only ordering. The store keeps `source` and
    `target` alive until the event is done.
    """

    def reserve(self, nbytes: int) -> Extent | None:
        """A range of at least `nbytes`, or None when the budget is used up."""

    def release(self, extent: Extent) -> None:
        """Gives the range back; no operation on it may be pending."""

    def write(self, extent: Extent, source: torch.Tensor, *, after: Sequence[Event] = ()) -> Timed: ...

    def read(self, extent: Extent, target: torch.Tensor, *, after: Sequence[Event] = ()) -> Timed: ...

    def close(self) -> None:
        """Waits for running operations, ends the threads, closes the files. Idempotent."""


class Stamp(Protocol):
    """A timed event of a compute stream."""

    def ns(self) -> int | None:
        """`time.monotonic_ns()` when the stream passed it; None while it has not."""

    def synchronize(self) -> None:
        """Blocks the calling host thread until it has."""


class HostStamp:
    """The time of its construction, for devices whose clock is the host's."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = time.monotonic_ns()

    def ns(self) -> int:
        return self.at

    def synchronize(self) -> None:
        return None


class HostSlab(Protocol):
    """A range of host addresses of which the first `nbytes` are backed by memory; grows and shrinks in place, at its end."""

    @property
    def memory(self) -> torch.Tensor:
        """The whole range; what lies beyond the bytes waited for must not be touched."""

    @property
    def nbytes(self) -> int:
        """Bytes taken from the system, or being taken."""

    def grow(self, nbytes: int) -> None:
        """Begins to take at least the first `nbytes` from the system; returns at once."""

    def wait(self, nbytes: int) -> None:
        """Returns when the first `nbytes` may be used.

        Raises:
            SwapError: the system refused some of them; the slab is then as large as what it gave.
        """

    def shrink(self, nbytes: int) -> None:
        """Gives back whole pieces beyond the first `nbytes`, where nothing may be in use."""

    def close(self) -> None:
        """Takes no more. What is taken is given back when nobody has a view of the memory any more. Idempotent."""


class Backend(Protocol):
    """One device and its lanes."""

    @property
    def device(self) -> torch.device: ...

    @property
    def d2h(self) -> CopyStream: ...

    @property
    def h2d(self) -> CopyStream: ...

    def here(self) -> int:
        """The caller's compute stream, read at call time and never cached (R5). Equal numbers are the same stream."""

    def saved_here(self, source: torch.Tensor) -> int:
        """The caller's compute stream, on which autograd saves `source`; what wrote `source` is ordered before its end."""

    def on(self, stream: int) -> AbstractContextManager[object]:
        """A context in which `stream` is the caller's compute stream."""

    def is_capturing(self) -> bool:
        """True while the caller's stream is captured into a graph: what is issued now runs later, and more than once."""

    def compute_event(self, stream: int | None = None) -> Timed:
        """An event at the current end of a compute stream, the caller's where none is named."""

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        """Work issued later on a compute stream, the caller's where none is named, runs after `event`.

        Raises what the event's operation failed with, where that is known.
        """

    def host_waits(self, event: Event) -> bool:
        """True where `compute_wait(event)` would stop the calling thread now, which could issue other work meanwhile.

        False where a device orders itself, and where the calling thread is the compute stream: it must wait in any case.
        """

    def compute_uses(self, buffer: torch.Tensor, stream: int | None = None, *, writes: bool = True) -> None:
        """Declares that a compute stream, the caller's where none is named, has just used `buffer` or is about to.

        The memory is then reused only after all that this stream has issued when the buffer is freed (`record_stream`).
        """

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory that belongs to the caller's compute stream."""

    def host_slab(self, nbytes: int) -> HostSlab:
        """Reserves addresses for `nbytes` of host memory (page-locked where the device has a bus to cross); takes none yet.

        Raises:
            SwapError: the system refuses them.
        """

    def synchronize(self) -> None:
        """The host waits until no copy is in flight."""

    def stamp(self, stream: int | None = None) -> Stamp | None:
        """Records a stamp on a compute stream, the caller's where none is named; None where times are not measured."""

    def begin_range(self, name: str) -> int:
        """Opens a range of the device's profiler (NVTX) around what is issued in it; returns its number for `end_range`."""

    def end_range(self, number: int) -> None:
        """Closes the range."""

    def close(self) -> None:
        """Ends the lanes. Idempotent."""


class OneComputeStream:
    """Base of backends whose only compute stream is the calling thread: the part of Backend about compute streams."""

    def here(self) -> int:
        return 0

    def saved_here(self, source: torch.Tensor) -> int:
        return 0

    def on(self, stream: int) -> AbstractContextManager[object]:
        return _SAME

    def is_capturing(self) -> bool:
        return False

    def compute_uses(self, buffer: torch.Tensor, stream: int | None = None, *, writes: bool = True) -> None:
        return None

    def begin_range(self, name: str) -> int:
        return 0

    def end_range(self, number: int) -> None:
        return None


_SAME = contextlib.nullcontext()
