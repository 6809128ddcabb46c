"""Backend of a simulated GPU: copy streams, pinned host memory and disk on the device's clocks.

Implements memo.swap's Backend, HostSlab and Disk. Copies move no bytes; each takes its bytes at the link's rate, after what
it waits for and what its stream was given before. While the other direction copies, too, it has the rate of both together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.swap.backends import OneComputeStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memo.machine import LinkRates
    from memo.rehearsal.clock import Clock
    from memo.swap.backends import Event


class SimulatedEvent:
    """End of an operation, known when it is issued."""

    __slots__ = ("_clock", "begin_ns", "end_ns", "is_of_host")

    def __init__(self, clock: Clock, begin_ns: int, end_ns: int, *, is_of_host: bool = False) -> None:
        self._clock = clock
        self.begin_ns = begin_ns
        self.end_ns = end_ns
        self.is_of_host = is_of_host
        """Whether it is a thread of the host, as a disk's are: a stream of the device cannot wait for it."""

    def query(self) -> bool:
        """True once the host's clock has passed it."""
        return self.end_ns <= self._clock.host_ns

    def synchronize(self) -> None:
        """Moves the host's clock to it."""
        self._clock.wait(self.end_ns)

    def interval_ns(self) -> tuple[int, int]:
        """Begin and end."""
        return self.begin_ns, self.end_ns

    def cancel(self) -> bool:
        """Returns False: a GPU's copies cannot be cancelled."""
        return False

    def ns(self) -> int:
        """Time of the stamp."""
        return self.end_ns


class _Lane:
    """One direction of the link; `other` is the opposite one."""

    def __init__(self, clock: Clock, alone: float, together: float) -> None:
        self._clock = clock
        self._alone, self._together = alone, together
        self._after_ns = 0
        self.free_ns = 0
        self.other: _Lane | None = None

    def wait(self, event: Event) -> None:
        """Orders later copies after `event`."""
        assert isinstance(event, SimulatedEvent)
        if event.is_of_host:
            event.synchronize()
        self._after_ns = max(self._after_ns, event.end_ns)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> SimulatedEvent:
        """Issues a copy."""
        begin = max(self.free_ns, self._after_ns, self._clock.host_ns)
        shared = self.other is not None and self.other.free_ns > begin
        self.free_ns = begin + round(source.nbytes / (self._together if shared else self._alone) * 1e9)
        return SimulatedEvent(self._clock, begin, self.free_ns)


class _Slab:
    """Pinned host memory, which a thread locks piece by piece."""

    def __init__(self, clock: Clock, nbytes: int, seconds_per_byte: float) -> None:
        self.memory = _address_space(nbytes)
        self.nbytes = 0
        self._clock = clock
        self._ns_per_byte = seconds_per_byte * 1e9
        self._pieces: list[tuple[int, int, int]] = []  # (first byte, end, time when it is begun)
        self._free_ns = 0
        self._calls: list[Callable[[], None]] = []

    def grow(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            begin = max(self._free_ns, self._clock.host_ns)
            self._pieces.append((self.nbytes, nbytes, begin))
            self._free_ns = begin + round((nbytes - self.nbytes) * self._ns_per_byte)
            self.nbytes = nbytes

    def wait(self, nbytes: int) -> None:
        ready = 0
        for first, end, begin in self._pieces:
            if first < nbytes:
                ready = max(ready, begin + round((min(end, nbytes) - first) * self._ns_per_byte))
        self._clock.wait(ready)

    def shrink(self, nbytes: int) -> None:
        if nbytes < self.nbytes:
            self.nbytes = nbytes
            self._pieces = [(first, min(end, nbytes), begin) for first, end, begin in self._pieces if first < nbytes]

    def when_freed(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def close(self) -> None:
        self.nbytes = 0
        calls, self._calls = self._calls, []
        for call in calls:
            call()


def _address_space(nbytes: int) -> torch.Tensor:
    """Addresses that no memory backs and no device counts."""
    from memo.allocator import byteless_storage

    return torch.empty(0, dtype=torch.uint8).set_(byteless_storage(nbytes), 0, (nbytes,), (1,))


class SimulatedDisk:
    """Disk tier with rates; implements Disk, whose ranges are their numbers of bytes. Threads of the host write and read.

    Args:
        clock: the machine's clock.
        budget: bytes; None is without limit.
        write_bytes_per_s: of all operations together.
        read_bytes_per_s: of all operations together.
    """

    def __init__(self, clock: Clock, budget: int | None, *, write_bytes_per_s: float, read_bytes_per_s: float) -> None:
        self._clock = clock
        self._left = budget
        self._rates = {"write": write_bytes_per_s, "read": read_bytes_per_s}
        self._free_ns = {"write": 0, "read": 0}

    def reserve(self, nbytes: int) -> int | None:
        """Reserves bytes of the budget."""
        if self._left is not None:
            if nbytes > self._left:
                return None
            self._left -= nbytes
        return nbytes

    @property
    def refusal(self) -> None:
        """Nothing: there is no file system."""

    def release(self, extent: int) -> None:
        """Gives the bytes back."""
        if self._left is not None:
            self._left += extent

    def write(self, extent: int, source: torch.Tensor, *, after: Sequence[Event] = ()) -> SimulatedEvent:
        """Writes after the events."""
        return self._run("write", source.nbytes, after)

    def read(self, extent: int, target: torch.Tensor, *, after: Sequence[Event] = ()) -> SimulatedEvent:
        """Reads after the events."""
        return self._run("read", target.nbytes, after)

    def _run(self, what: str, nbytes: int, after: Sequence[Event]) -> SimulatedEvent:
        ends = [event.end_ns for event in after if isinstance(event, SimulatedEvent)]
        begin = max([self._clock.host_ns, self._free_ns[what], *ends])
        self._free_ns[what] = begin + round(nbytes / self._rates[what] * 1e9)
        return SimulatedEvent(self._clock, begin, self._free_ns[what], is_of_host=True)

    def close(self) -> None:
        """Does nothing."""


class SimulatedBackend(OneComputeStream):
    """Backend of one simulated GPU.

    Args:
        clock: the device's clocks.
        link: rates of its link.
        lock_s_per_byte: seconds that pinning takes for each byte.
    """

    device = torch.device("cpu")

    def __init__(self, clock: Clock, link: LinkRates, *, lock_s_per_byte: float) -> None:
        self._clock = clock
        self.d2h = _Lane(clock, link.d2h_bytes_per_s, link.d2h_together_bytes_per_s)
        self.h2d = _Lane(clock, link.h2d_bytes_per_s, link.h2d_together_bytes_per_s)
        self.d2h.other, self.h2d.other = self.h2d, self.d2h
        self._lock_s_per_byte = lock_s_per_byte

    @property
    def kernels(self) -> str:
        """Returns "cuda"."""
        return "cuda"

    def now_ns(self) -> int:
        """Returns the simulated host's clock."""
        return self._clock.host_ns

    def finish(self) -> None:
        """Moves the host's clock to the end of all work."""
        self._clock.finish()
        self.synchronize()

    def synchronize(self) -> None:
        """Moves the host's clock to the end of all copies."""
        self._clock.wait(max(self.d2h.free_ns, self.h2d.free_ns))

    def compute_event(self, stream: int | None = None) -> SimulatedEvent:
        """Records an event at the compute stream's end."""
        now = max(self._clock.compute_ns, self._clock.host_ns)
        return SimulatedEvent(self._clock, now, now)

    def stamp(self, stream: int | None = None) -> SimulatedEvent:
        """Records a stamp, likewise."""
        return self.compute_event()

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        """Orders the compute stream after `event`; stops the host for one of the host's threads."""
        assert isinstance(event, SimulatedEvent)
        if event.is_of_host:
            event.synchronize()
        compute = self._clock.compute
        compute.end_ns = max(compute.end_ns, event.end_ns)

    def would_block(self, event: Event) -> bool:
        """True for an event of a thread of the host that is still to come."""
        return isinstance(event, SimulatedEvent) and event.is_of_host and not event.query()

    def is_past(self, event: Event) -> bool:
        """True for an event of a thread of the host that is done."""
        return isinstance(event, SimulatedEvent) and event.is_of_host and event.query()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocates device memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_slab(self, nbytes: int) -> _Slab:
        """Reserves host memory."""
        return _Slab(self._clock, nbytes, self._lock_s_per_byte)

    def close(self) -> None:
        """Does nothing."""
