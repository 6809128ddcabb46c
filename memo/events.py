"""The nouns of a trace: what the engine did, event by event. Shared by every package; imports nothing of ours.

A trace file (`trace.rank{N}.jsonl`) is one JSON object a line: a header, events in the order they became known, and an
end line. Times are nanoseconds of one monotonic clock since the header's `origin`; a span's line is written when the
span has ended, so readers sort by `t`. docs/trace-format.md documents every field.

    {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": ..., "meta": {...}}
    {"k": "state", "t": 1200, "step": 3, "id": 17, "to": "live", "module": "layers.4", "nbytes": 65536, ...}
    {"k": "span", "t": 1300, "d": 900, "step": 3, "lane": "nvme-write", "id": 17, "nbytes": 65536}
    {"k": "end", "t": 99000, "events": 812, "dropped": 0}
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, ClassVar, Protocol

__all__ = [
    "FORMAT",
    "VERSION",
    "CounterEvent",
    "Event",
    "Lane",
    "Note",
    "Span",
    "Stall",
    "StallCause",
    "StateChange",
    "StepMark",
    "TensorState",
    "Tier",
    "Tracer",
    "Use",
    "UseKind",
]

FORMAT = "memo-trace"
VERSION = 1


class Lane(enum.StrEnum):
    """Where time passes: one row of the timeline each."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    D2H = "d2h"
    H2D = "h2d"
    DISK_WRITE = "nvme-write"
    DISK_READ = "nvme-read"


class Tier(enum.StrEnum):
    """Where bytes rest."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class TensorState(enum.StrEnum):
    """The life of one saved storage; the legal transitions are drawn in docs/design.md.

    live -> leaving -> away -> returning -> back -> gone, and gone is reachable from each. Between the halves of a split
    backward what is back may be away once more.
    """

    LIVE = "live"  # on the device as autograd saved it; no copy has begun
    LEAVING = "leaving"  # a copy is under way; the source is still held
    AWAY = "away"  # the source is dropped; the bytes are in a lower tier
    RETURNING = "returning"  # a reload is under way
    BACK = "back"  # on the device again
    GONE = "gone"  # no handle is left; every buffer is given back


class UseKind(enum.StrEnum):
    """How backward found the bytes when it asked for them."""

    LIVE = "live"  # the source was still on the device: forwarded, no reload
    PREFETCHED = "prefetched"  # the reload had been issued earlier
    FETCHED = "fetched"  # nothing had been issued: the reload began only now


class StallCause(enum.StrEnum):
    """Why the host or the compute stream waited."""

    DRAIN = "drain"  # a copy out had not finished when its source had to go
    RELOAD = "reload"  # a reload had not finished when backward needed it
    HOST_FULL = "host-full"  # no room in the host arena until a write to disk ends
    DISK_QUEUE = "disk-queue"  # the disk is behind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """One transition of one saved storage. `module`, `shape` and `dtype` come with the first one (`to` = live)."""

    kind: ClassVar[str] = "state"
    t: int
    step: int
    id: int
    to: TensorState
    nbytes: int
    tier: Tier | None = None
    module: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Time spent in a lane: a copy (`id`, `nbytes`) or a layer's work (`module`, `phase`)."""

    kind: ClassVar[str] = "span"
    t: int
    d: int
    step: int
    lane: Lane
    id: int | None = None
    nbytes: int | None = None
    module: str | None = None
    phase: str | None = None  # "forward", "backward", "optimizer"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The host or the compute stream waited from `t` for `d` nanoseconds."""

    kind: ClassVar[str] = "stall"
    t: int
    d: int
    step: int
    cause: StallCause
    module: str | None = None
    id: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Backward asked for a saved storage."""

    kind: ClassVar[str] = "use"
    t: int
    step: int
    id: int
    how: UseKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CounterEvent:
    """Bytes measured in a tier at an instant, all of memory and not only what memo moves."""

    kind: ClassVar[str] = "counter"
    t: int
    step: int
    tier: Tier
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """A training step begins or ends."""

    kind: ClassVar[str] = "step"
    t: int
    step: int
    phase: str  # "begin" or "end"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A warning or a fallback, in words."""

    kind: ClassVar[str] = "note"
    t: int
    step: int
    cause: str
    message: str


Event = StateChange | Span | Stall | Use | CounterEvent | StepMark | Note


class Tracer(Protocol):
    """What the engine needs of a trace: a clock and a place to put events."""

    step: int

    def now(self) -> int:
        """Nanoseconds since the trace's origin."""

    def at(self, monotonic_ns: int) -> int:
        """The same for a reading of `time.monotonic_ns()`."""

    def emit(self, event: Event) -> None:
        """Keeps one event; never blocks on I/O and never raises for want of room."""


def to_json(event: Event) -> dict[str, Any]:
    """The event as one line's object: `k` first, None fields left out."""
    line: dict[str, Any] = {"k": event.kind}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if value is not None:
            line[field.name] = value
    return line
