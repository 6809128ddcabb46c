"""Adds up one step's events: how long each layer took, how long it waited, and how fast each lane was.

It listens to the engine like a trace does, and hands every event on where a trace is being written. What it owns is sums;
it draws no conclusions (memo.autoplan.profile_from_step does).
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from memo.events import Lane, Span, Stall, StallCause, StateChange

if TYPE_CHECKING:
    from memo.events import Event, Tracer

__all__ = ["LaneUse", "LayerTimes", "StepTimeline", "StepTimes"]


@dataclasses.dataclass(slots=True, kw_only=True)
class LayerTimes:
    """One layer's time in a step, in nanoseconds, over all of its calls."""

    calls: int = 0
    forward_ns: int = 0
    backward_ns: int = 0
    """From its first request to its last, waiting and recompute included."""
    recompute_ns: int = 0
    waited_ns: int = 0
    """Host time within `backward_ns` that went into waiting for reloads."""
    saved_bytes: int = 0
    """Of storages that may move, whole."""
    storages: int = 0
    """How many these are."""
    largest_storage_bytes: int = 0

    def saved(self, nbytes: int) -> None:
        """Counts one storage."""
        self.saved_bytes += nbytes
        self.storages += 1
        self.largest_storage_bytes = max(self.largest_storage_bytes, nbytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """What one lane carried."""

    nbytes: int
    busy_ns: int
    """While at least one copy ran."""

    @property
    def bytes_per_s(self) -> float:
        """While it was busy; 0 where nothing was carried."""
        return self.nbytes / self.busy_ns * 1e9 if self.busy_ns else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step, from the beginning of its first forward to the end of the last layer's backward."""

    layers: dict[str, LayerTimes]
    """By name, in the order of their forwards."""
    lanes: dict[Lane, LaneUse]
    begin_ns: int
    first_layer_ns: int
    """When the first layer began; times are of the trace's clock."""
    turn_ns: tuple[int, int]
    """When the last forward ended, and the first backward began: the head and the loss are between."""
    end_ns: int
    stalls_ns: dict[StallCause, int]

    @property
    def span_ns(self) -> int:
        """Forward and backward together."""
        return self.end_ns - self.begin_ns


class StepTimeline:
    """Satisfies `memo.events.Tracer`. `beyond` is the trace being written, or None."""

    def __init__(self, beyond: Tracer | None = None) -> None:
        self._beyond = beyond
        self._step = 0
        self.restart()

    @property
    def step(self) -> int:
        """Of the trace, where there is one."""
        return self._step if self._beyond is None else self._beyond.step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value
        if self._beyond is not None:
            self._beyond.step = value

    def now(self) -> int:
        """Nanoseconds of the trace's clock, or of the machine's monotonic one."""
        return time.monotonic_ns() if self._beyond is None else self._beyond.now()

    def at(self, monotonic_ns: int) -> int:
        """The same for a reading of `time.monotonic_ns()`."""
        return monotonic_ns if self._beyond is None else self._beyond.at(monotonic_ns)

    def emit(self, event: Event) -> None:
        """Adds one event up, and hands it on."""
        if self._beyond is not None:
            self._beyond.emit(event)
        if isinstance(event, Span):
            if event.module is not None:
                self._worked(event, event.module)
            elif event.nbytes is not None:
                self._copies.setdefault(event.lane, []).append((event.t, event.t + event.d, event.nbytes))
        elif isinstance(event, StateChange):
            if event.module is not None:  # only with a life's first state
                self._layer(event.module).saved(event.nbytes)
        elif isinstance(event, Stall):
            self._stalls[event.cause] = self._stalls.get(event.cause, 0) + event.d
            if event.cause is StallCause.RELOAD and event.module is not None:
                self._layer(event.module).waited_ns += event.d

    def restart(self) -> None:
        """Forgets what was added up: another step begins now."""
        self._begin_ns = self.now()
        self._layers: dict[str, LayerTimes] = {}
        self._copies: dict[Lane, list[tuple[int, int, int]]] = {}
        self._stalls: dict[StallCause, int] = {}
        self._forwards: list[tuple[int, int]] = []
        self._backwards: list[tuple[int, int]] = []

    def times(self) -> StepTimes | None:
        """The sums; None where no layer ran forward and backward."""
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

    def _worked(self, span: Span, module: str) -> None:
        layer = self._layer(module)
        if span.lane is Lane.RECOMPUTE:
            layer.recompute_ns += span.d
        elif span.phase == "forward":
            layer.calls += 1
            layer.forward_ns += span.d
            self._forwards.append((span.t, span.t + span.d))
        elif span.phase == "backward":
            layer.backward_ns += span.d
            self._backwards.append((span.t, span.t + span.d))


def _use(copies: list[tuple[int, int, int]]) -> LaneUse:
    """The union of the copies' intervals: a disk runs several at a time."""
    busy, covered = 0, 0
    for begin, end, _ in sorted(copies):
        busy += max(0, end - max(begin, covered))
        covered = max(covered, end)
    return LaneUse(nbytes=sum(nbytes for _, _, nbytes in copies), busy_ns=busy)
