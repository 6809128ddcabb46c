"""The CUDA backend: one stream out, one stream in, events between them and the program's compute streams.

Copies never run on a compute stream, and which one the caller is on is read at each call: under pipelines, FSDP2 or
recompute it is not the one a constructor saw. A stream is named by its raw handle, which takes a tenth of the time that a
torch.cuda.Stream takes to ask for and to compare. Device buffers are allocated on the caller's stream, so that the caching
allocator reuses their memory in that stream's order; `record_stream` makes it wait for any other stream that used them, and
does nothing for their own.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from memo.swap.memory.numa import node_of_pci_device
from memo.swap.memory.pinned import PinnedSlab, copy_pieces

if TYPE_CHECKING:
    from memo.swap.backends.protocol import Event, Timed

__all__ = ["CudaBackend", "CudaStream", "copy_stream", "numa_node"]

# The driver tells the time between two events as a 24-bit float of milliseconds: to 1 us after ten seconds, to a quarter of
# a millisecond after an hour.
_LONGEST_ELAPSED_MS = 10_000.0

_SAME = contextlib.nullcontext()


def _is_capturing() -> bool:
    return bool(torch._C._cuda_isCurrentStreamCapturing())


class _Clock:
    """Translates timed events into host time, by their distance from one event whose host time is known."""

    def __init__(self, device: torch.device) -> None:
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        self._origin = event, time.monotonic_ns()

    def ns(self, event: torch.cuda.Event) -> int:
        """`time.monotonic_ns()` at which a timed event that is done took place."""
        origin, origin_ns = self._origin
        elapsed_ms: float = origin.elapsed_time(event)
        at = origin_ns + round(elapsed_ms * 1e6)
        if elapsed_ms > _LONGEST_ELAPSED_MS:
            self._origin = event, at
        return at


class _CudaEvent:
    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        # A question to the driver would break off a capture that is under way; an unanswered one is asked again later.
        return not _is_capturing() and bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False  # what stands in a stream's order cannot be taken back

    def order(self, stream: torch.cuda.Stream) -> None:
        """Work issued later on `stream` runs after this event; the host does not wait."""
        stream.wait_event(self._event)


class _CudaCopy(_CudaEvent):
    """The event at the end of a copy; `begin` and `clock` are None where copies are not timed."""

    __slots__ = ("_begin", "_clock")

    def __init__(self, event: torch.cuda.Event, begin: torch.cuda.Event | None, clock: _Clock | None) -> None:
        super().__init__(event)
        self._begin = begin
        self._clock = clock

    def interval_ns(self) -> tuple[int, int] | None:
        if self._begin is None or self._clock is None or not self._event.query():
            return None
        return self._clock.ns(self._begin), self._clock.ns(self._event)


class CudaStream:
    """A copy stream of one GPU. With a `clock` each copy stands between two timed events."""

    def __init__(self, device: torch.device, clock: _Clock | None) -> None:
        self.stream = torch.cuda.Stream(device)
        self._clock = clock

    def wait(self, event: Event) -> None:
        _order(event, self.stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> _CudaCopy:
        timing = self._clock is not None
        begin = torch.cuda.Event(enable_timing=True) if timing else None
        # Blocking: the threads of a disk tier that wait for a copy sleep, where they would each spin on a core.
        end = torch.cuda.Event(enable_timing=timing, blocking=True)
        with torch.cuda.stream(self.stream):
            if begin is not None:
                begin.record(self.stream)
            copy_pieces(target, source)
            end.record(self.stream)
        return _CudaCopy(end, begin, self._clock)


class _CudaStamp(_CudaEvent):
    """A timed event of a compute stream."""

    __slots__ = ("_clock",)

    def __init__(self, stream: torch.cuda.Stream, clock: _Clock) -> None:
        super().__init__(torch.cuda.Event(enable_timing=True))
        self._clock = clock
        self._event.record(stream)

    def ns(self) -> int | None:
        return self._clock.ns(self._event) if self.query() else None


def _order(event: Event, stream: torch.cuda.Stream) -> None:
    """Orders later work of `stream` after `event`; the host waits where that is a thread's event and not the device's."""
    if isinstance(event, _CudaEvent):
        event.order(stream)
    else:
        event.synchronize()


class CudaBackend:
    """Streams and events of one GPU.

    With `timing` each copy, wait and recompute stands between two timed events; without it events are the cheap kind and
    their times are unknown.
    """

    def __init__(self, device: torch.device, *, timing: bool = False) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._clock = _Clock(self.device) if timing else None
        self.d2h = CudaStream(self.device, self._clock)
        self.h2d = CudaStream(self.device, self._clock)
        self._streams: dict[int, torch.cuda.Stream] = {}  # by raw handle, each that the program has been on
        # Storage of a buffer -> its allocation stream. Those of the program's own tensors only the allocator knows.
        self._owner: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def here(self) -> int:
        handle: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(self.device)
        return handle

    def _stream(self, handle: int | None) -> torch.cuda.Stream:
        """The compute stream of this handle; the caller's for None."""
        return self._streams[self.here() if handle is None else handle]

    def saved_here(self, source: torch.Tensor) -> int:
        return self.here()

    def on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        return _SAME if stream == self.here() else torch.cuda.stream(self._streams[stream])

    def is_capturing(self) -> bool:
        return _is_capturing()

    def compute_event(self, stream: int | None = None) -> Timed:
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return _CudaEvent(event)

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        _order(event, self._stream(stream))

    def host_waits(self, event: Event) -> bool:
        return not isinstance(event, _CudaEvent) and not event.query()

    def compute_uses(self, buffer: torch.Tensor, stream: int | None = None, *, writes: bool = True) -> None:
        user = self.here() if stream is None else stream
        if self._owner.get(buffer.untyped_storage()) != user:
            buffer.record_stream(self._streams[user])

    def empty(self, nbytes: int) -> torch.Tensor:
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            if "CUDA out of memory" not in str(error):
                raise
            # The planned allocator cannot throw torch's own class; who makes room and tries again waits for that one.
            raise torch.OutOfMemoryError(str(error)) from None
        self._owner[buffer.untyped_storage()] = self.here()
        return buffer

    def host_slab(self, nbytes: int) -> PinnedSlab:
        return PinnedSlab(nbytes, self.device, node=numa_node(self.device))

    def synchronize(self) -> None:
        self.d2h.stream.synchronize()
        self.h2d.stream.synchronize()

    def stamp(self, stream: int | None = None) -> _CudaStamp | None:
        if self._clock is None or _is_capturing():
            return None
        return _CudaStamp(self._stream(stream), self._clock)

    def begin_range(self, name: str) -> int:
        return int(torch.cuda.nvtx.range_start(name))

    def end_range(self, number: int) -> None:
        torch.cuda.nvtx.range_end(number)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)


def numa_node(device: torch.device) -> int | None:
    """The GPU's NUMA node; None where the system does not say."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        return node_of_pci_device(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    except AttributeError:  # an older torch does not tell
        return None


def copy_stream(device: torch.device) -> CudaStream:
    """A copy stream beside the backend's two, without timing: for bytes on their way to and from disk."""
    return CudaStream(device, None)
