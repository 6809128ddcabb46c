"""Event types of a trace. Shared by every package; imports nothing of ours.

A trace file (`trace.rank{N}.jsonl`) has one JSON object per line: a header, events in the order they became known, and
an end line. Times `t` and durations `d` are nanoseconds of one monotonic clock since the header's origin. A span's line
is written when the span has ended, so readers sort by `t`. docs/trace-format.md documents every field.

    {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": ..., "meta": {...}}
    {"k": "state", "t": 1200, "step": 3, "id": 17, "to": "live", "module": "layers.4", "nbytes": 65536, ...}
    {"k": "span", "t": 1300, "d": 900, "step": 3, "lane": "nvme-write", "id": 17, "nbytes": 65536}
    {"k": "end", "t": 99000, "events": 812, "dropped": 0}
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, ClassVar, Literal, Protocol

FORMAT = "memo-trace"
VERSION = 1
PLAN_MADE = "plan"
"""Cause of the note by which a run says that it follows a solver's plan from now on; the message names its limits."""


class Lane(enum.StrEnum):
    """A row of the timeline: computation, recomputation, collectives, or one direction of copies."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    NETWORK = "network"
    D2H = "d2h"
    H2D = "h2d"
    DISK_WRITE = "nvme-write"
    DISK_READ = "nvme-read"


class TierName(enum.StrEnum):
    """A place where bytes are kept."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Owner(enum.StrEnum):
    """What device memory that lasts from step to step is for."""

    WEIGHTS = "weights"  # parameters and buffers
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    STATES = "states"  # the three together, where only their sum is known


class TensorState(enum.StrEnum):
    """State of one saved storage; docs/design.md shows the legal transitions.

    live -> leaving -> away -> returning -> back -> gone; gone can follow each of them. Between the two halves of a
    split backward (input and weight gradients) a storage that is back may become away again.
    """

    LIVE = "live"  # on the device as autograd saved it; no copy has begun
    LEAVING = "leaving"  # a copy is under way; the source is still held
    AWAY = "away"  # the source is dropped; the bytes are in a lower tier
    RETURNING = "returning"  # a reload is under way
    BACK = "back"  # on the device again
    GONE = "gone"  # no handle is left; every buffer is released


class UseKind(enum.StrEnum):
    """Where the bytes were when backward asked for them."""

    LIVE = "live"  # the source was still on the device: forwarded, no reload
    PREFETCHED = "prefetched"  # the reload had been issued earlier
    FETCHED = "fetched"  # nothing had been issued: the reload began only now


class StallCause(enum.StrEnum):
    """Why the host or the compute stream waited."""

    DRAIN = "drain"  # the copy out of a storage had not ended when its device memory had to be released
    RELOAD = "reload"  # a reload had not ended when backward needed the bytes
    HOST_FULL = "host-full"  # no room in the host tier until a write to disk ends
    DISK_QUEUE = "disk-queue"  # the disk's queue is full
    COLLECTIVE = "collective"  # a collective had not ended when compute needed its result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """A state transition of one saved storage. Only the first one, to `live`, has the fields from `module` on."""

    kind: ClassVar[str] = "state"
    t: int
    step: int
    id: int
    to: TensorState
    nbytes: int
    tier: TierName | None = None
    module: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    op: str | None = None  # the operation whose result it is, by the name of its node in autograd's graph
    line: str | None = None  # Python lines that saved it, innermost first; with stacks only
    coded_nbytes: int | None = None  # bytes of its codes, where it is one that a codec may code


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Time spent in a lane by a copy (`id`, `nbytes`) or by a layer (`module`, `phase`).

    A copy of codes (`codec`) has in `nbytes` what moved, and in `decoded_nbytes` the bytes of the values.
    """

    kind: ClassVar[str] = "span"
    t: int
    d: int
    step: int
    lane: Lane
    id: int | None = None
    nbytes: int | None = None
    module: str | None = None
    phase: str | None = None  # "forward", "backward", "optimizer"
    decoded_nbytes: int | None = None
    # Of a layer on a GPU: when the host had issued its begin, and for how long it issued the rest.
    issued: int | None = None
    issued_d: int | None = None


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
class StorageUse:
    """A request of backward for a saved storage."""

    kind: ClassVar[str] = "use"
    t: int
    step: int
    id: int
    how: UseKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CounterEvent:
    """Bytes in use in a tier at one time: all of its memory, not only what memo moves."""

    kind: ClassVar[str] = "counter"
    t: int
    step: int
    tier: TierName
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """Device memory of one owner: all of it from `t` on, or, with `module`, one of its largest tensors."""

    kind: ClassVar[str] = "owned"
    t: int
    step: int
    owner: Owner
    nbytes: int
    module: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """The begin or end of a training step."""

    kind: ClassVar[str] = "step"
    t: int
    step: int
    phase: Literal["begin", "end"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A warning, a fallback or an error, as text; with `module`, where it happened."""

    kind: ClassVar[str] = "note"
    t: int
    step: int
    cause: str
    message: str
    module: str | None = None


OUT_OF_MEMORY = "out-of-memory"
"""Cause of the Note of an error for want of memory."""

Event = StateChange | Span | Stall | StorageUse | CounterEvent | Owned | StepMark | Note


class Tracer(Protocol):
    """Sink of the engine's events, with a clock. Methods may be called from any thread."""

    step: int

    @property
    def stacks(self) -> bool:
        """True: the Python lines that saved a storage are wanted."""

    def now(self) -> int:
        """Returns the nanoseconds since the trace's origin."""

    def at(self, monotonic_ns: int) -> int:
        """Converts a reading of `time.monotonic_ns()` to nanoseconds since the trace's origin."""

    def emit(self, event: Event) -> None:
        """Records one event. Never blocks on I/O, and never raises because memory or disk is full."""


def to_json(event: Event) -> dict[str, Any]:
    """Converts an event to the JSON object of its line: `k` comes first, fields that are None are left out."""
    line: dict[str, Any] = {"k": event.kind}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if value is not None:
            line[field.name] = value
    return line
