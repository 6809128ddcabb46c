"""Sums of one step's events: time and waits of each layer, bytes and rate of each lane.

A StepTimeline receives the engine's events as a trace does, and passes them on to the run's own trace, if there is one.
It only adds up; memo.autoplan.profile_from_step interprets the sums.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from memo.events import Lane, Span, Stall, StallCause, StateChange

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.events import Event, Note, Tracer


@dataclasses.dataclass(slots=True, kw_only=True)
class LayerTimes:
    """Sums of one layer in a step, over all of its calls."""

    calls: int = 0
    forward_ns: int = 0
    backward_ns: int = 0
    """From the layer's first request for a saved tensor to its last one, waits and recompute included."""
    recomputes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Begins and ends of the recomputes in `backward_ns`."""
    waits: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Begin and end of each wait for reloads; a recompute waits, too."""
    saved_bytes: int = 0
    """Bytes of the storages that may be moved."""
    storages: int = 0
    """Number of these storages."""
    largest_storage_bytes: int = 0
    spared_bytes: int = 0
    """Bytes by which codes are fewer, where a codec may code a storage."""

    @property
    def own_backward_ns(self) -> int:
        """`backward_ns` without what offloading adds to it."""
        return max(self.backward_ns - _covered_ns(self.recomputes + self.waits), 0)

    @property
    def recompute_ns(self) -> int:
        """Time of the recomputes without their waits."""
        return _covered_ns(self.recomputes + self.waits) - _covered_ns(self.waits)

    def saved(self, nbytes: int, coded_nbytes: int | None = None) -> None:
        """Counts one saved storage; `coded_nbytes`: as codes, where it may be coded."""
        self.saved_bytes += nbytes
        self.spared_bytes += 0 if coded_nbytes is None else nbytes - coded_nbytes
        self.storages += 1
        self.largest_storage_bytes = max(self.largest_storage_bytes, nbytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """Traffic of one lane in a step."""

    nbytes: int
    busy_ns: int
    """Time during which at least one copy ran."""

    @property
    def bytes_per_s(self) -> float:
        """Rate while at least one copy ran; 0 without copies."""
        return self.nbytes / self.busy_ns * 1e9 if self.busy_ns else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one step; points in time are nanoseconds of the trace's clock."""

    layers: dict[str, LayerTimes]
    """Times by layer name, in the order of their forwards."""
    lanes: dict[Lane, LaneUse]
    begin_ns: int
    """Begin of the first forward of the model."""
    first_layer_ns: int
    """Begin of the first layer's forward."""
    turn_ns: tuple[int, int]
    """End of the last forward of a layer, begin of the first backward of one; head and loss are in between."""
    end_ns: int
    """End of the last backward of a layer."""
    stalls_ns: dict[StallCause, int]

    @property
    def span_ns(self) -> int:
        """Duration of forward and backward."""
        return self.end_ns - self.begin_ns


class StepTimeline:
    """Tracer that adds up one step's events.

    Args:
        tracer: the run's own trace, which gets every event too, or None.
        now_ns: the clock of the events, without a trace.
    """

    def __init__(self, tracer: Tracer | None = None, *, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._tracer = tracer
        self._now_ns = now_ns
        self._step = 0
        self.restart()

    @property
    def step(self) -> int:
        """Number of the step under way."""
        return self._step if self._tracer is None else self._tracer.step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value
        if self._tracer is not None:
            self._tracer.step = value

    @property
    def stacks(self) -> bool:
        """True where the run's trace wants the Python lines that saved a storage."""
        return self._tracer is not None and self._tracer.stacks

    def now(self) -> int:
        """Nanoseconds of the trace's clock, or of the monotonic clock without a trace."""
        return self._now_ns() if self._tracer is None else self._tracer.now()

    def at(self, monotonic_ns: int) -> int:
        """Converts a reading of `time.monotonic_ns()` to the clock of `now`."""
        return monotonic_ns if self._tracer is None else self._tracer.at(monotonic_ns)

    def emit(self, event: Event) -> None:
        """Adds one event to the sums, and passes it on to the trace."""
        if self._tracer is not None:
            self._tracer.emit(event)
        if isinstance(event, Span):
            if event.module is not None:
                self._add_work(event, event.module)
            elif event.nbytes is not None:
                self._copies.setdefault(event.lane, []).append((event.t, event.t + event.d, event.nbytes))
        elif isinstance(event, StateChange):
            if event.module is not None:  # on a storage's first state only
                self._layer(event.module).saved(event.nbytes, event.coded_nbytes)
        elif isinstance(event, Stall):
            self._stalls[event.cause] = self._stalls.get(event.cause, 0) + event.d
            if event.cause is StallCause.RELOAD and event.module is not None:
                self._layer(event.module).waits.append((event.t, event.t + event.d))

    def tell(self, note: Note) -> None:
        """Passes a note on to the trace."""
        if self._tracer is not None:
            self._tracer.emit(note)

    def restart(self) -> None:
        """Clears the sums: a step begins now."""
        self._begin_ns = self.now()
        self._layers: dict[str, LayerTimes] = {}
        self._copies: dict[Lane, list[tuple[int, int, int]]] = {}
        self._stalls: dict[StallCause, int] = {}
        self._forwards: list[tuple[int, int]] = []
        self._backwards: list[tuple[int, int]] = []

    def times(self) -> StepTimes | None:
        """Returns the sums; None if no layer ran forward and backward."""
        if not self._forwards or not self._backwards:
            return None
        return StepTimes(
            layers=self._layers,
            lanes={lane: _use(copies) for lane, copies in self._copies.items()},
            begin_ns=self._begin_ns,
            first_layer_ns=min(begin for begin, _ in self._forwards),
            turn_ns=(max(end for _, end in self._forwards), min(begin for begin, _ in self._backwards)),
            end_ns=max(end for _, end in self._backwards),
            stalls_ns=self._stalls,
        )

    def _layer(self, module: str) -> LayerTimes:
        return self._layers.setdefault(module, LayerTimes())

    def _add_work(self, span: Span, module: str) -> None:
        layer = self._layer(module)
        if span.lane is Lane.RECOMPUTE:
            layer.recomputes.append((span.t, span.t + span.d))
        elif span.phase == "forward":
            layer.calls += 1
            layer.forward_ns += span.d
            self._forwards.append((span.t, span.t + span.d))
        elif span.phase == "backward":
            layer.backward_ns += span.d
            self._backwards.append((span.t, span.t + span.d))


def _use(copies: list[tuple[int, int, int]]) -> LaneUse:
    """Sums the bytes, and the union of the intervals: copies on a disk overlap."""
    busy = _covered_ns([(begin, end) for begin, end, _ in copies])
    return LaneUse(nbytes=sum(nbytes for _, _, nbytes in copies), busy_ns=busy)


def _covered_ns(intervals: list[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    covered, until = 0, 0
    for begin, end in sorted(intervals):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered
