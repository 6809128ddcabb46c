"""CUDA backend: one D2H and one H2D copy stream, ordered with the program's compute streams by events.

Copies never run on a compute stream. The caller's compute stream is read at each call: under pipelines, FSDP2 or
recompute it differs from the one at construction. Streams are identified by raw handle, which takes a tenth of the time
to get and compare that a torch.cuda.Stream takes. Device buffers are allocated on the caller's stream, so the caching
allocator reuses their memory in that stream's order; `record_stream` makes the allocator wait for other streams that
used them.

A stream that has waited for a copy has waited for all that its lane was given before. So a lane waits once for an event, and
a compute stream once for the latest of several copies: the engine drops a layer's sources latest copy first.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from memo.swap.memory.numa import node_of_pci_device
from memo.swap.memory.pinned import PinnedSlab, copy_pieces
from memo.torch_private import found, place

if TYPE_CHECKING:
    from memo.swap.backends.protocol import Event, Timed

# The driver reports the time between two events in milliseconds with 24 bits of precision: 1 us after ten seconds, a
# quarter of a millisecond after an hour.
_LONGEST_ELAPSED_MS = 10_000.0

_NO_CONTEXT = contextlib.nullcontext()
_CUDA, _CAPTURING = place("cuda_isCurrentStreamCapturing")


def _is_capturing() -> bool:
    return bool(getattr(_CUDA, _CAPTURING)())


class _Clock:
    """Converts timed events to host time, by their distance from an event whose host time is known."""

    def __init__(self, device: torch.device) -> None:
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        self._origin = event, time.monotonic_ns()

    def ns(self, event: torch.cuda.Event) -> int:
        """Returns the `time.monotonic_ns()` of a timed event that is done."""
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
        # cudaEventQuery would invalidate a capture in progress; the caller asks again later.
        return not _is_capturing() and bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False  # work issued on a stream cannot be cancelled

    def order(self, stream: torch.cuda.Stream) -> None:
        """Orders later work of `stream` after this event; the host does not wait."""
        stream.wait_event(self._event)


class _CudaCopy(_CudaEvent):
    """Event at the end of a copy; `begin` and `clock` are None where copies are not timed.

    `waited` is its lane's: by compute stream, the number of the latest copy that the stream has waited for.
    """

    __slots__ = ("_begin", "_clock", "_number", "_waited")

    def __init__(
        self,
        event: torch.cuda.Event,
        begin: torch.cuda.Event | None,
        clock: _Clock | None,
        number: int,
        waited: dict[int, int],
    ) -> None:
        super().__init__(event)
        self._begin = begin
        self._clock = clock
        self._number = number
        self._waited = waited

    def order_once(self, handle: int, stream: torch.cuda.Stream) -> None:
        """Orders later work of a compute stream after this copy, unless it has waited for this or a later one."""
        if self._waited.get(handle, 0) < self._number:
            stream.wait_event(self._event)
            self._waited[handle] = self._number

    def interval_ns(self) -> tuple[int, int] | None:
        if self._begin is None or self._clock is None or not self._event.query():
            return None
        return self._clock.ns(self._begin), self._clock.ns(self._event)


class CudaStream:
    """Implements CopyStream for one GPU. With a `clock`, each copy is enclosed by two timed events.

    Copies are issued by one thread at a time: their numbers are their order.
    """

    def __init__(self, device: torch.device, clock: _Clock | None) -> None:
        self.stream = torch.cuda.Stream(device)
        self._clock = clock
        self._latest: Event | None = None  # waited for last
        self._numbers = itertools.count(1)
        self._waited: dict[int, int] = {}

    def wait(self, event: Event) -> None:
        """Orders later copies after `event`."""
        if event is not self._latest:
            _order(event, self.stream)
            self._latest = event

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> _CudaCopy:
        """Issues a copy in either direction; asynchronous where the host buffer is pinned."""
        timing = self._clock is not None
        begin = torch.cuda.Event(enable_timing=True) if timing else None
        # Blocking: disk threads that wait for a copy sleep instead of each spinning on a core.
        end = torch.cuda.Event(enable_timing=timing, blocking=True)
        with torch.cuda.stream(self.stream):
            if begin is not None:
                begin.record(self.stream)
            copy_pieces(target, source)
            end.record(self.stream)
        return _CudaCopy(end, begin, self._clock, next(self._numbers), self._waited)


class _CudaStamp(_CudaEvent):
    """Timed event of a compute stream."""

    __slots__ = ("_clock",)

    def __init__(self, stream: torch.cuda.Stream, clock: _Clock) -> None:
        super().__init__(torch.cuda.Event(enable_timing=True))
        self._clock = clock
        self._event.record(stream)

    def ns(self) -> int | None:
        return self._clock.ns(self._event) if self.query() else None


def _order(event: Event, stream: torch.cuda.Stream) -> None:
    """Orders later work of `stream` after `event`; blocks the host for an event of a host thread."""
    if isinstance(event, _CudaEvent):
        event.order(stream)
    else:
        event.synchronize()


class CudaBackend:
    """Implements Backend for one GPU.

    Args:
        device: The GPU; without an index the current one.
        timing: Enclose each copy, wait and recompute in two timed events. Events without timing are cheaper.
    """

    def __init__(self, device: torch.device, *, timing: bool = False) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._clock = _Clock(self.device) if timing else None
        self._raw_stream = found("cuda_getCurrentRawStream")
        self.d2h = CudaStream(self.device, self._clock)
        self.h2d = CudaStream(self.device, self._clock)
        self._streams: dict[int, torch.cuda.Stream] = {}  # by raw handle: compute streams seen so far
        # Allocation stream of each buffer's storage. Of the program's own tensors only the allocator knows it.
        self._owner: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def current_stream(self) -> int:
        """Returns the raw handle of the caller's stream."""
        handle: int = self._raw_stream(self.device.index)
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream(self.device)
        return handle

    def _stream(self, handle: int | None) -> torch.cuda.Stream:
        """Compute stream of a handle; the caller's for None."""
        return self._streams[self.current_stream() if handle is None else handle]

    def saving_stream(self, source: torch.Tensor) -> int:
        """Returns the caller's stream."""
        return self.current_stream()

    def stream_context(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """Makes `stream` current in a context."""
        return _NO_CONTEXT if stream == self.current_stream() else torch.cuda.stream(self._streams[stream])

    def is_capturing(self) -> bool:
        """Returns True during CUDA graph capture."""
        return _is_capturing()

    def compute_event(self, stream: int | None = None) -> Timed:
        """Records an untimed event."""
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return _CudaEvent(event)

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        """Makes a compute stream wait for `event`; blocks the host for an event of a host thread."""
        handle = self.current_stream() if stream is None else stream
        if type(event) is _CudaCopy:
            event.order_once(handle, self._streams[handle])
        else:
            _order(event, self._streams[handle])

    def is_past(self, event: Event) -> bool:
        """Returns False for an event of the GPU: to ask takes as long as to order a stream after it."""
        if isinstance(event, _CudaEvent) or not event.query():
            return False
        event.synchronize()
        return True

    def would_block(self, event: Event) -> bool:
        """Returns True for an event of a host thread that is not done."""
        return not isinstance(event, _CudaEvent) and not event.query()

    def compute_uses(self, buffer: torch.Tensor, stream: int | None = None, *, writes: bool = True) -> None:
        """Calls `record_stream`, unless the buffer was allocated on that stream."""
        user = self.current_stream() if stream is None else stream
        if self._owner.get(buffer.untyped_storage()) != user:
            buffer.record_stream(self._streams[user])

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates device memory on the caller's stream.

        Raises:
            OutOfMemoryError: torch's class, whichever allocator is installed.
        """
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            if "CUDA out of memory" not in str(error):
                raise
            # The planned allocator cannot throw torch's own class, which callers catch to free memory and retry.
            raise torch.OutOfMemoryError(str(error)) from None
        self._owner[buffer.untyped_storage()] = self.current_stream()
        return buffer

    def allocated_here(self, buffer: torch.Tensor) -> None:
        """Notes the owner, which only the allocator knows of the program's memory."""
        self._owner[buffer.untyped_storage()] = self.current_stream()

    def host_slab(self, nbytes: int) -> PinnedSlab:
        """Reserves addresses of pinned memory on the GPU's NUMA node."""
        return PinnedSlab(nbytes, self.device, node=numa_node(self.device))

    def synchronize(self) -> None:
        """Blocks the host until both copy streams are idle."""
        self.d2h.stream.synchronize()
        self.h2d.stream.synchronize()

    def finish(self) -> None:
        """Blocks the host until all streams of the GPU are idle."""
        torch.cuda.synchronize(self.device)

    def now_ns(self) -> int:
        """Returns `time.monotonic_ns()`."""
        return time.monotonic_ns()

    @property
    def kernels(self) -> str:
        """Returns "cuda"."""
        return "cuda"

    def stamp(self, stream: int | None = None) -> _CudaStamp | None:
        """Records a timed event; None without timing and during graph capture."""
        if self._clock is None or _is_capturing():
            return None
        return _CudaStamp(self._stream(stream), self._clock)

    def begin_range(self, name: str) -> int:
        """Opens an NVTX range."""
        return int(torch.cuda.nvtx.range_start(name))

    def end_range(self, number: int) -> None:
        """Closes an NVTX range."""
        torch.cuda.nvtx.range_end(number)

    def close(self) -> None:
        """Waits for all work of the GPU."""
        torch.cuda.synchronize(self.device)


def numa_node(device: torch.device) -> int | None:
    """Returns the GPU's NUMA node; None where the system does not report it."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        return node_of_pci_device(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    except AttributeError:  # an older torch has no PCI address
        return None


def copy_stream(device: torch.device) -> CudaStream:
    """Creates a copy stream beside the backend's two, without timing: for transfers to and from disk."""
    return CudaStream(device, None)
