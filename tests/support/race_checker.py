"""A backend that finds races: deterministic schedules and vector clocks in place of streams. For tests.

The same engine runs on it as on CUDA. Copies are carried out as late as the order allows ("lazy"), at once ("eager"), or
at seeded random moments ("random"), and every access is checked against a vector clock: two accesses to overlapping bytes,
one of them a write, must be ordered by an event, whatever the schedule did. Delayed copies alone miss races that the
clocks find. Three further rules: a copy whose buffer is gone when it runs is a use after free; freeing memory is a write
on the stream that it was allocated on, ordered after the streams that the allocator was told of; fresh memory is filled
with ones, which read as NaN.

There are two compute streams, 0 and 1. What runs on them runs at once; that nothing but `wait_for` orders them shows in
their clocks. The host has a clock too: what it has seen to be done is before whatever it issues next, on any stream.

A disk operation gets a lane of its own: the store promises no order but `after`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import time
import weakref
from typing import TYPE_CHECKING, Literal

import torch

from memo.swap.memory.free_list import FreeList
from memo.swap.memory.slab import PageableSlab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memo.swap.backends import Event

Policy = Literal["lazy", "eager", "random"]
_POISON = 0xFF  # NaN in every floating type


class Race(AssertionError):
    """Two accesses that nothing orders, or a buffer used after it was freed."""


_Clock = collections.Counter[str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Access:
    lane: str
    clock: _Clock
    write: bool
    start: int
    end: int

    def before(self, clock: _Clock) -> bool:
        return clock[self.lane] >= self.clock[self.lane]


class _Buffer:
    """Accesses to one buffer, and its streams: the one that it was allocated on and those that `compute_uses` named."""

    def __init__(self, stream: int) -> None:
        self.accesses: list[_Access] = []
        self.streams = {stream}


class _Lane:
    """A queue of operations and what is known to have happened before its next one."""

    def __init__(self, backend: CheckingBackend, name: str) -> None:
        self.backend = backend
        self.name = name
        self.clock: _Clock = collections.Counter()
        self._queue: collections.deque[Callable[[], None]] = collections.deque()
        self.issued = 0
        self.done = 0

    def tick(self) -> _Clock:
        self.clock |= self.backend.seen
        self.clock[self.name] += 1
        return self.clock.copy()

    def issue(self, operation: Callable[[], None]) -> _LaneEvent:
        self.issued += 1
        self._queue.append(operation)
        event = _LaneEvent(self, self.issued, self.tick())
        self.backend.maybe_run(self)
        return event

    def run_until(self, position: int) -> None:
        while self.done < position:
            operation = self._queue.popleft()
            self.done += 1
            operation()


class _LaneEvent:
    def __init__(self, lane: _Lane, position: int, clock: _Clock) -> None:
        self.lane = lane
        self.position = position
        self.clock = clock

    def query(self) -> bool:
        self.lane.backend.maybe_run(self.lane)
        if self.lane.done < self.position:
            return False
        self.lane.backend.seen |= self.clock
        return True

    def synchronize(self) -> None:
        self.lane.run_until(self.position)
        self.lane.backend.seen |= self.clock

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False


class Past:
    """An event of a compute stream, whose work runs at once and is therefore done. Without a clock it orders nothing."""

    def __init__(self, clock: _Clock | None = None) -> None:
        self.clock: _Clock = collections.Counter() if clock is None else clock

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False


class _CheckingStream:
    def __init__(self, backend: CheckingBackend, name: str) -> None:
        self.lane = _Lane(backend, name)

    def wait(self, event: Event) -> None:
        _wait(self.lane, event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> _LaneEvent:
        return self.lane.backend.issue_copy(self.lane, target, source)

    def synchronize(self) -> None:
        self.lane.run_until(self.lane.issued)
        self.lane.backend.seen |= self.lane.clock


def _wait(lane: _Lane, event: Event) -> None:
    assert isinstance(event, (_LaneEvent, Past))
    lane.clock |= event.clock
    if isinstance(event, _LaneEvent):
        lane.issue(lambda: event.lane.run_until(event.position))


class CheckingBackend:
    """One CPU "device" under a schedule.

    `races` collects what is found while memory is freed, where nothing can be raised; look at it at the end. With
    `hosted_disk` the disk's operations are threads of the host, as behind a GPU: the device cannot wait for them, the host
    can, and `host_stops` counts how often it had to.
    """

    __module__ = "torch"  # layers of test programs name it, as they do torch's streams; it is no state of theirs

    def __init__(self, policy: Policy = "lazy", *, seed: int = 0, hosted_disk: bool = False) -> None:
        self.host_stops = 0
        self._hosted_disk = hosted_disk
        self.device = torch.device("cpu")
        self.races: list[str] = []
        self.seen: _Clock = collections.Counter()
        """Clock of all that the host has seen to be done."""
        self.d2h = _CheckingStream(self, "d2h")
        self.h2d = _CheckingStream(self, "h2d")
        self._compute = [_Lane(self, f"compute stream {number}") for number in range(2)]
        self.current = 0
        """The compute stream that the caller is on."""
        self._policy = policy
        self._random = random.Random(seed)
        self._buffers: weakref.WeakKeyDictionary[torch.UntypedStorage, _Buffer] = weakref.WeakKeyDictionary()

    def maybe_run(self, lane: _Lane) -> None:
        """Lets the schedule make progress in a lane."""
        if self._policy == "eager":
            lane.run_until(lane.issued)
        elif self._policy == "random" and lane.done < lane.issued and self._random.random() < 0.3:
            lane.run_until(self._random.randint(lane.done + 1, lane.issued))

    def issue_copy(self, lane: _Lane, target: torch.Tensor, source: torch.Tensor) -> _LaneEvent:
        """A copy on `lane`; holds neither buffer, so that freeing one too early shows."""
        assert target.numel() == source.numel()
        lane.tick()
        self.access(lane, source, write=False)
        self.access(lane, target, write=True)
        read, write = _Weak(source), _Weak(target)

        return lane.issue(lambda: _copy(write.get(lane.name, "target"), read.get(lane.name, "source")))

    def access(self, lane: _Lane, buffer: torch.Tensor, *, write: bool) -> None:
        """Declares an access at the lane's present clock and checks it against all earlier ones."""
        storage = buffer.untyped_storage()
        start, stop = 0, storage.nbytes()  # of the program's own tensors; the engine's buffers are bytes in one piece
        if buffer.dtype is torch.uint8:
            start = int(buffer.storage_offset())
            stop = start + buffer.numel()
        check_access(self._known(storage).accesses, lane, start, stop, write=write)

    def _known(self, storage: torch.UntypedStorage) -> _Buffer:
        known = self._buffers.get(storage)
        if known is None:
            known = self._buffers[storage] = _Buffer(self.current)
            weakref.finalize(storage, self._freed, known).atexit = False
        return known

    def _freed(self, buffer: _Buffer) -> None:
        """Checks that all accesses are ordered before the memory's reuse: after its streams' work so far."""
        before: _Clock = collections.Counter(self.seen)
        for stream in buffer.streams:
            before |= self._compute[stream].clock
        for access in buffer.accesses:
            if not access.before(before):
                self.races.append(f"memory freed while an access on {access.lane} is not ordered before it")

    def allocates(self, tensor: torch.Tensor) -> None:
        """Declares a tensor that the program has allocated on its current stream."""
        storage = tensor.untyped_storage()
        check_access(self._known(storage).accesses, self._ticking(self.current), 0, storage.nbytes(), write=True)

    def reads(self, tensor: torch.Tensor) -> None:
        """The program reads this tensor on the stream that it is on, and tells no allocator."""
        storage = tensor.untyped_storage()
        check_access(self._known(storage).accesses, self._ticking(self.current), 0, storage.nbytes(), write=False)

    def wait_for(self, stream: int) -> None:
        """The program's own edge: the stream that it is on runs after what `stream` has issued so far."""
        self.compute_wait(self.compute_event(stream))

    def current_stream(self) -> int:
        return self.current

    def saving_stream(self, source: torch.Tensor) -> int:
        if source.untyped_storage() not in self._buffers:
            self.allocates(source)
        return self.current

    @contextlib.contextmanager
    def stream_context(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def is_capturing(self) -> bool:
        return False

    def _ticking(self, stream: int) -> _Lane:
        lane = self._compute[stream]
        lane.tick()
        return lane

    def compute_event(self, stream: int | None = None) -> Past:
        lane = self._ticking(self.current if stream is None else stream)
        event = Past(lane.clock.copy())
        lane.tick()
        return event

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        assert isinstance(event, (_LaneEvent, Past))
        self.host_stops += self.would_block(event)
        if isinstance(event, _LaneEvent):
            event.lane.run_until(event.position)
            if self._is_hosted(event):
                self.seen |= event.clock
        self._compute[self.current if stream is None else stream].clock |= event.clock

    def _is_hosted(self, event: _LaneEvent) -> bool:
        return self._hosted_disk and event.lane not in (self.d2h.lane, self.h2d.lane)

    def is_past(self, event: Event) -> bool:
        return False

    def would_block(self, event: Event) -> bool:
        return isinstance(event, _LaneEvent) and self._is_hosted(event) and not event.query()

    def compute_uses(self, buffer: torch.Tensor, stream: int | None = None, *, writes: bool = True) -> None:
        user = self.current if stream is None else stream
        self.access(self._ticking(user), buffer, write=writes)
        self._known(buffer.untyped_storage()).streams.add(user)

    def empty(self, nbytes: int) -> torch.Tensor:
        buffer = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        self.compute_uses(buffer)
        return buffer

    def allocated_here(self, buffer: torch.Tensor) -> None:
        self.compute_uses(buffer)

    def host_slab(self, nbytes: int) -> _PoisonedSlab:
        return _PoisonedSlab(nbytes)

    def synchronize(self) -> None:
        self.d2h.synchronize()
        self.h2d.synchronize()

    def finish(self) -> None:
        self.synchronize()  # compute streams run at once

    def now_ns(self) -> int:
        return time.monotonic_ns()

    @property
    def kernels(self) -> str:
        return "cpu"

    def stamp(self, stream: int | None = None) -> None:
        return None  # there is no time, only order

    def begin_range(self, name: str) -> int:
        return 0

    def end_range(self, number: int) -> None:
        return None

    def close(self) -> None:
        return None


class _PoisonedSlab(PageableSlab):
    def grow(self, nbytes: int) -> None:
        self.memory[self.nbytes : nbytes].fill_(_POISON)
        super().grow(nbytes)


class _Weak:
    """A buffer by its geometry, held weakly."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._storage = weakref.ref(buffer.untyped_storage())
        self._offset = buffer.storage_offset()
        self._nbytes = buffer.numel()

    def get(self, lane: str, what: str) -> torch.Tensor:
        storage = self._storage()
        if storage is None:
            raise Race(f"use after free: the {what} of a copy on {lane} was freed before the copy ran")
        return torch.empty(0, dtype=torch.uint8).set_(storage, self._offset, (self._nbytes,), (1,))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def check_access(accesses: list[_Access], lane: _Lane, start: int, end: int, *, write: bool) -> None:
    """Raises Race unless every earlier conflicting access is ordered before `lane`; then records this one."""
    for other in accesses:
        if other.start < end and start < other.end and (write or other.write) and not other.before(lane.clock):
            kinds = f"{'write' if write else 'read'} on {lane.name}", f"{'write' if other.write else 'read'}"
            raise Race(f"{kinds[0]} races with {kinds[1]} on {other.lane} (bytes {start} to {end})")
    if write:  # whatever lies inside is ordered before this write, and later accesses are checked against it
        accesses[:] = [other for other in accesses if not (start <= other.start and other.end <= end)]
    accesses.append(_Access(lane.name, lane.clock.copy(), write, start, end))


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    offset: int
    nbytes: int


class CheckingDisk:
    """A disk in memory under the same clocks. `capacity` bytes; reuses freed ranges at once, lowest first."""

    def __init__(self, backend: CheckingBackend, capacity: int) -> None:
        self._backend = backend
        self._free = FreeList(capacity, align=512)
        self._bytes = torch.full((capacity,), _POISON, dtype=torch.uint8)
        self._accesses: list[_Access] = []
        self._operations = 0

    def reserve(self, nbytes: int) -> _Range | None:
        offset = self._free.allocate(nbytes)
        return None if offset is None else _Range(offset, nbytes)

    def release(self, extent: object) -> None:
        assert isinstance(extent, _Range)
        self._free.free(extent.offset)

    def write(self, extent: object, source: torch.Tensor, *, after: Sequence[Event] = ()) -> _LaneEvent:
        lane, block = self._operation(extent, after, write=True)
        self._backend.access(lane, source, write=False)
        kept = _Weak(source)
        return lane.issue(lambda: _copy(block, kept.get(lane.name, "source")))

    def read(self, extent: object, target: torch.Tensor, *, after: Sequence[Event] = ()) -> _LaneEvent:
        lane, block = self._operation(extent, after, write=False)
        self._backend.access(lane, target, write=True)
        kept = _Weak(target)
        return lane.issue(lambda: _copy(kept.get(lane.name, "target"), block))

    def close(self) -> None:
        return None

    def _operation(self, extent: object, after: Sequence[Event], *, write: bool) -> tuple[_Lane, torch.Tensor]:
        assert isinstance(extent, _Range)
        self._operations += 1
        lane = _Lane(self._backend, f"disk operation {self._operations}")
        for event in after:
            _wait(lane, event)
        lane.tick()
        start, end = extent.offset, extent.offset + extent.nbytes
        check_access(self._accesses, lane, start, end, write=write)
        return lane, self._bytes[start:end]
