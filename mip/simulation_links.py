"""The links of a simulated step: copies in four queues, whose heads share the bandwidth of five links.

Owns the queues, the clock and who gets how much of a link. Does not know layers or tiers. A queue is first in, first out;
its head moves at a steady rate until a head anywhere begins or ends, and no link is ever given more than its rate.

    HOST_OUT  ──┐                                  what goes to disk crosses D2H and the disk at one pace, block by
    DISK_OUT  ──┴─ d2h ─┬─ duplex                  block through a ring of staging memory, so its rate is that of the
    HOST_IN   ──┬─ h2d ─┘                          slower of the two; what comes back likewise
    DISK_IN   ──┘           DISK_OUT ── disk write      DISK_IN ── disk read

Links are shared max-min: all heads get the same until a link is full, and those that do not cross it go on growing.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence

from memo.errors import PlanInvalid
from memo.mip.hardware import LaneRates
from memo.trace.events import Lane

__all__ = ["Copy", "Links", "Queue", "shares"]


class Queue(enum.IntEnum):
    """Where a copy waits for its turn: a direction and the tier at its far end."""

    HOST_OUT = 0
    DISK_OUT = 1
    HOST_IN = 2
    DISK_IN = 3

    @property
    def out(self) -> bool:
        """Away from the device."""
        return self in (Queue.HOST_OUT, Queue.DISK_OUT)

    @property
    def disk(self) -> bool:
        """The far end is the disk."""
        return self in (Queue.DISK_OUT, Queue.DISK_IN)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What a copy in this queue occupies, the link to the device first."""
        return _LANES[self]


_LANES = {
    Queue.HOST_OUT: (Lane.D2H,),
    Queue.DISK_OUT: (Lane.D2H, Lane.DISK_WRITE),
    Queue.HOST_IN: (Lane.H2D,),
    Queue.DISK_IN: (Lane.H2D, Lane.DISK_READ),
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Copy:
    """Bytes on their way; `start_s` and `end_s` are known when it has begun and ended."""

    queue: Queue
    call: int
    """Which call of a layer the bytes belong to."""
    module: str
    nbytes: int
    issued_s: float
    left_nbytes: float = 0.0
    start_s: float = math.nan
    end_s: float = math.nan
    slowest: Lane | None = None
    """Of the lanes that it crossed, the one that set its pace when it ended."""

    @property
    def done(self) -> bool:
        return not math.isnan(self.end_s)


def _links(rates: LaneRates) -> tuple[tuple[float, frozenset[Queue]], ...]:
    """Each link's rate and the queues that cross it."""
    return (
        (rates.d2h_bytes_per_s, frozenset({Queue.HOST_OUT, Queue.DISK_OUT})),
        (rates.h2d_bytes_per_s, frozenset({Queue.HOST_IN, Queue.DISK_IN})),
        (rates.duplex_bytes_per_s, frozenset(Queue)),
        (rates.disk_write_bytes_per_s, frozenset({Queue.DISK_OUT})),
        (rates.disk_read_bytes_per_s, frozenset({Queue.DISK_IN})),
    )


def shares(rates: LaneRates, busy: frozenset[Queue]) -> dict[Queue, float]:
    """Max-min fair rates of the busy queues: fill all alike, stop those whose link is full, go on with the others."""
    found: dict[Queue, float] = {}
    links = _links(rates)
    while len(found) < len(busy):
        growing = busy - found.keys()
        share, full = math.inf, growing
        for rate, crossing in links:
            sharing = crossing & growing
            if sharing:
                room = (rate - sum(found.get(queue, 0.0) for queue in crossing)) / len(sharing)
                if room < share:
                    share, full = max(room, 0.0), sharing
        found |= dict.fromkeys(full, share)
    return found


class Links:
    """All copies of one rank, and the time up to which they have moved."""

    def __init__(self, rates: LaneRates) -> None:
        self.now_s = 0.0
        self.copies: list[Copy] = []
        self._rates = rates
        self._queues: dict[Queue, collections.deque[Copy]] = {queue: collections.deque() for queue in Queue}
        self._disk_rates = {
            Queue.DISK_OUT: rates.disk_write_bytes_per_s,
            Queue.DISK_IN: rates.disk_read_bytes_per_s,
        }
        self._shares: dict[frozenset[Queue], dict[Queue, float]] = {}

    def put(self, queue: Queue, *, call: int, module: str, nbytes: int) -> Copy:
        """Queues a copy now."""
        copy = Copy(
            queue=queue,
            call=call,
            module=module,
            nbytes=nbytes,
            issued_s=self.now_s,
            left_nbytes=float(nbytes),
        )
        self.copies.append(copy)
        self._queues[queue].append(copy)
        self._begin(queue)
        return copy

    def advance(self, to_s: float) -> None:
        """Lets the copies move until `to_s`."""
        while self._step(to_s):
            pass
        self.now_s = to_s

    def wait(self, copies: Sequence[Copy]) -> None:
        """Lets the copies move until all of these have ended.

        Raises:
            PlanInvalid: one of them never will: its link has no bandwidth.
        """
        while not all(copy.done for copy in copies):
            if not self._step(math.inf):
                stuck = next(copy for copy in copies if not copy.done)
                way = f"{'to' if stuck.queue.out else 'from'} {'disk' if stuck.queue.disk else 'host'}"
                raise PlanInvalid(
                    f"{stuck.module} moves {stuck.nbytes} bytes {way}, where the hardware has no bandwidth"
                )

    def _begin(self, queue: Queue) -> None:
        waiting = self._queues[queue]
        if waiting and math.isnan(waiting[0].start_s):
            waiting[0].start_s = self.now_s

    def _step(self, to_s: float) -> bool:
        """Moves on to the next end of a copy, at most to `to_s`; False when none ends by then."""
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
        busy = frozenset(queue for queue, waiting in self._queues.items() if waiting)
        if busy not in self._shares:
            self._shares[busy] = shares(self._rates, busy)
        return self._shares[busy]

    def _move(self, rates: Mapping[Queue, float], seconds: float) -> None:
        for queue, rate in rates.items():
            head = self._queues[queue][0]
            head.left_nbytes = max(0.0, head.left_nbytes - rate * seconds)

    def _end(self, queues: Iterable[Queue], rates: Mapping[Queue, float]) -> None:
        for queue in queues:
            ended = self._queues[queue].popleft()
            ended.left_nbytes, ended.end_s = 0.0, self.now_s
            disk_sets_the_pace = rates[queue] == self._disk_rates.get(queue)
            ended.slowest = queue.lanes[-1 if disk_sets_the_pace else 0]
            self._begin(queue)
