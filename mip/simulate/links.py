"""Links of a simulated step: copies in four queues, whose heads share the bandwidth of five links.

Owns the queues, the clock and the division of bandwidth. Knows no layers or tiers. A queue is first in, first out; its
head moves at a constant rate until a head of any queue begins or ends, and no link ever exceeds its rate.

    HOST_OUT  ──┐                                  disk bytes cross D2H and the disk at one pace, block by
    DISK_OUT  ──┴─ d2h ─┬─ duplex                  block through a ring of staging memory, so their rate is that
    HOST_IN   ──┬─ h2d ─┘                          of the slower of the two; on the way back likewise
    DISK_IN   ──┘           DISK_OUT ── disk write      DISK_IN ── disk read

What is issued first crosses first. Copies of one call to host and to disk, which are issued together, share their
direction equally, and the two directions share the duplex rate equally; what one of two cannot use, the other gets.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence

from memo.errors import PlanInvalid
from memo.events import Lane
from memo.mip.inputs.hardware import LaneRates
from memo.units import format_bytes


class Queue(enum.IntEnum):
    """Queue of copies: a direction and the tier at the far end."""

    HOST_OUT = 0
    DISK_OUT = 1
    HOST_IN = 2
    DISK_IN = 3

    @property
    def out(self) -> bool:
        """Whether the copies leave the device."""
        return self in (Queue.HOST_OUT, Queue.DISK_OUT)

    @property
    def disk(self) -> bool:
        """Whether the far end is the disk."""
        return self in (Queue.DISK_OUT, Queue.DISK_IN)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes that a copy in this queue occupies, the link to the device first."""
        return _LANES[self]


_DIRECTIONS = ((Queue.HOST_OUT, Queue.DISK_OUT), (Queue.HOST_IN, Queue.DISK_IN))
_LANES = {
    Queue.HOST_OUT: (Lane.D2H,),
    Queue.DISK_OUT: (Lane.D2H, Lane.DISK_WRITE),
    Queue.HOST_IN: (Lane.H2D,),
    Queue.DISK_IN: (Lane.H2D, Lane.DISK_READ),
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Copy:
    """One copy; `start_s` and `end_s` are NaN until it has begun and ended."""

    queue: Queue
    number: int
    """Number among all copies, in the order of issue."""
    call: int
    """Number of the layer's call that the bytes belong to."""
    module: str
    nbytes: int
    decoded_nbytes: int = 0
    """Bytes of the values, where codes are copied."""
    issued_s: float
    left_nbytes: float = 0.0
    start_s: float = math.nan
    end_s: float = math.nan
    slowest: Lane | None = None
    """The lane that limited its rate when it ended."""

    @property
    def done(self) -> bool:
        """Whether the copy has ended."""
        return not math.isnan(self.end_s)


def shares(rates: LaneRates, busy: frozenset[Queue], first: frozenset[Queue] = frozenset()) -> dict[Queue, float]:
    """Divides the links' bandwidth among the heads of the busy queues.

    Args:
        rates: of the links.
        busy: queues that have a copy.
        first: queues whose head takes all it can of its direction, before the other queue's.

    Returns:
        Bytes per second by queue.
    """
    limits = {
        Queue.HOST_OUT: rates.d2h_bytes_per_s,
        Queue.DISK_OUT: min(rates.d2h_bytes_per_s, rates.disk_write_bytes_per_s),
        Queue.HOST_IN: rates.h2d_bytes_per_s,
        Queue.DISK_IN: min(rates.h2d_bytes_per_s, rates.disk_read_bytes_per_s),
    }
    wanted = {queue: limits[queue] if queue in busy else 0.0 for queue in Queue}
    directions = _split(
        rates.duplex_bytes_per_s,
        min(rates.d2h_bytes_per_s, wanted[Queue.HOST_OUT] + wanted[Queue.DISK_OUT]),
        min(rates.h2d_bytes_per_s, wanted[Queue.HOST_IN] + wanted[Queue.DISK_IN]),
    )
    given: dict[Queue, float] = {}
    for rate, pair in zip(directions, _DIRECTIONS, strict=True):
        host, disk = pair
        if first.isdisjoint(pair):
            given[host], given[disk] = _split(rate, wanted[host], wanted[disk])
        else:
            early, late = pair if host in first else (disk, host)
            given[early] = min(rate, wanted[early])
            given[late] = min(rate - given[early], wanted[late])
    return {queue: given[queue] for queue in sorted(busy)}


def _split(rate: float, one: float, other: float) -> tuple[float, float]:
    """Divides a rate equally among two demands; what one does not need the other gets."""
    half = rate / 2
    return min(one, max(half, rate - other)), min(other, max(half, rate - one))


class Links:
    """Copies of one rank, and the clock up to which they have moved."""

    def __init__(self, rates: LaneRates) -> None:
        self.now_s = 0.0
        self.copies: list[Copy] = []
        self._rates = rates
        self._queues: dict[Queue, collections.deque[Copy]] = {queue: collections.deque() for queue in Queue}
        self._disk_rates = {
            Queue.DISK_OUT: rates.disk_write_bytes_per_s,
            Queue.DISK_IN: rates.disk_read_bytes_per_s,
        }
        self._shares: dict[tuple[frozenset[Queue], frozenset[Queue]], dict[Queue, float]] = {}

    def put(self, queue: Queue, *, call: int, module: str, nbytes: int, decoded_nbytes: int = 0) -> Copy:
        """Issues a copy at the current time."""
        copy = Copy(
            queue=queue,
            number=len(self.copies),
            call=call,
            module=module,
            nbytes=nbytes,
            decoded_nbytes=decoded_nbytes,
            issued_s=self.now_s,
            left_nbytes=float(nbytes),
        )
        self.copies.append(copy)
        self._queues[queue].append(copy)
        return copy

    def advance(self, to_s: float) -> None:
        """Moves the clock and the copies to `to_s`."""
        while self._step(to_s):
            pass
        self.now_s = to_s

    def wait(self, copies: Sequence[Copy]) -> None:
        """Moves the clock until all of these copies have ended.

        Raises:
            PlanInvalid: the link of one of them has no bandwidth.
        """
        while not all(copy.done for copy in copies):
            if not self._step(math.inf):
                stuck = next(copy for copy in copies if not copy.done)
                way = f"{'to' if stuck.queue.out else 'from'} {'disk' if stuck.queue.disk else 'host'}"
                raise PlanInvalid(
                    f"{stuck.module} moves {format_bytes(stuck.nbytes)} {way}, where the hardware has no bandwidth"
                )

    def _step(self, to_s: float) -> bool:
        """Moves the clock to the next end of a copy, at most to `to_s`; False when none ends by then."""
        rates = self._rates_now()
        times = {queue: self._queues[queue][0].left_nbytes / rate for queue, rate in rates.items() if rate > 0}
        seconds = min(times.values(), default=math.inf)
        first_end_s = self.now_s + seconds
        if first_end_s > to_s or seconds == math.inf:
            if to_s < math.inf:
                self._move(rates, to_s - self.now_s)
            return False
        self._move(rates, seconds)
        self.now_s = first_end_s
        self._end([queue for queue, needed in times.items() if needed == seconds], rates)
        return True

    def _rates_now(self) -> dict[Queue, float]:
        heads = {queue: waiting[0] for queue, waiting in self._queues.items() if waiting}
        first = set()
        for host, disk in _DIRECTIONS:
            if host in heads and disk in heads and heads[host].call != heads[disk].call:
                first.add(host if heads[host].number < heads[disk].number else disk)
        key = (frozenset(heads), frozenset(first))
        if key not in self._shares:
            self._shares[key] = shares(self._rates, *key)
        return self._shares[key]

    def _move(self, rates: Mapping[Queue, float], seconds: float) -> None:
        for queue, rate in rates.items():
            head = self._queues[queue][0]
            if rate > 0 and math.isnan(head.start_s):
                head.start_s = self.now_s
            head.left_nbytes = max(0.0, head.left_nbytes - rate * seconds)

    def _end(self, queues: Iterable[Queue], rates: Mapping[Queue, float]) -> None:
        for queue in queues:
            ended = self._queues[queue].popleft()
            ended.left_nbytes, ended.end_s = 0.0, self.now_s
            disk_sets_the_pace = rates[queue] == self._disk_rates.get(queue)
            ended.slowest = queue.lanes[-1 if disk_sets_the_pace else 0]
