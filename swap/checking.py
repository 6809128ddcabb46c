"""A backend that finds races: deterministic schedules and vector clocks in place of streams. For tests.

The same engine runs on it as on CUDA. Copies are carried out as late as the order allows ("lazy"), at once ("eager"), or
at seeded random moments ("random"), and every access is checked against a vector clock: two accesses to overlapping bytes,
one of them a write, must be ordered by an event, whatever the schedule did. Delayed copies alone miss races that the
clocks find. Three further rules: a copy whose buffer is gone when it runs is a use after free; freeing memory is a write
on the compute stream; fresh memory is filled with ones, which read as NaN.

A disk operation gets a lane of its own: the store promises no order but `after`.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import weakref
from typing import TYPE_CHECKING, Literal

import torch

from memo.swap.freelist import FreeList
from memo.swap.slab import PageableSlab

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memo.swap.backend import Event

__all__ = ["CheckingBackend", "CheckingDisk", "Past", "Race"]

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
        self.lane.backend.compute.clock |= self.clock  # the host has seen it, and issues what follows
        return True

    def synchronize(self) -> None:
        self.lane.run_until(self.position)
        self.lane.backend.compute.clock |= self.clock

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False


class Past:
    """The compute stream at one moment: the host is the compute stream, so it is done. Without a clock, no moment."""

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
        self.lane.backend.compute.clock |= self.lane.clock


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

    def __init__(self, policy: Policy = "lazy", *, seed: int = 0, hosted_disk: bool = False) -> None:
        self.host_stops = 0
        self._hosted_disk = hosted_disk
        self.device = torch.device("cpu")
        self.races: list[str] = []
        self.compute = _Lane(self, "compute")
        self.d2h = _CheckingStream(self, "d2h")
        self.h2d = _CheckingStream(self, "h2d")
        self._marked = self.compute.tick()  # where the latest compute event stands
        self._policy = policy
        self._random = random.Random(seed)
        self._accesses: weakref.WeakKeyDictionary[torch.UntypedStorage, list[_Access]] = weakref.WeakKeyDictionary()

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
        accesses = self._accesses.get(storage)
        if accesses is None:
            accesses = self._accesses[storage] = []
            weakref.finalize(storage, self._freed, accesses).atexit = False
            if not write:  # made by the compute stream, no later than the event that says so
                accesses.append(_Access("compute", self._marked, True, 0, storage.nbytes()))
        start = int(buffer.storage_offset())  # every buffer is uint8
        check_access(accesses, lane, start, start + buffer.numel(), write=write)

    def _freed(self, accesses: list[_Access]) -> None:
        for access in accesses:
            if not access.before(self.compute.clock):
                self.races.append(f"memory freed while an access on {access.lane} is not ordered before it")

    def compute_event(self) -> Past:
        self._marked = self.compute.clock.copy()
        event = Past(self._marked)
        self.compute.tick()
        return event

    def compute_wait(self, event: Event) -> None:
        assert isinstance(event, (_LaneEvent, Past))
        self.host_stops += self.host_waits(event)
        event.synchronize()

    def host_waits(self, event: Event) -> bool:
        is_disk = isinstance(event, _LaneEvent) and event.lane not in (self.d2h.lane, self.h2d.lane)
        return self._hosted_disk and is_disk and not event.query()

    def compute_uses(self, buffer: torch.Tensor) -> None:
        self.compute.tick()
        self.access(self.compute, buffer, write=True)

    def empty(self, nbytes: int) -> torch.Tensor:
        buffer = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        self.compute_uses(buffer)
        return buffer

    def host_slab(self, nbytes: int) -> _PoisonedSlab:
        return _PoisonedSlab(nbytes)

    def synchronize(self) -> None:
        self.d2h.synchronize()
        self.h2d.synchronize()

    def stamp(self) -> _NoTime:
        return _NoTime()

    def close(self) -> None:
        return None


class _PoisonedSlab(PageableSlab):
    def grow(self, nbytes: int) -> None:
        self.memory[self.nbytes : nbytes].fill_(_POISON)
        super().grow(nbytes)


class _NoTime:
    def ns(self) -> int | None:
        return 0


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
