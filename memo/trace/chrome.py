"""Conversion of traces to Chrome-trace JSON, which Perfetto and chrome://tracing open.

    pid            rank
    tid            a lane; overlapping spans of a lane go to further rows, so complete events never overlap
    X              spans, and stalls in rows of their own
    i              the start of a stall, and every note
    C              bytes in each tier: saved storages by their states, measured totals, copies in flight
    s, t, f        the path of a storage: copy out, disk, copy in
    M              names and order of ranks and lanes

Times are microseconds with three decimals, so no nanosecond is lost; ranks share the axis of the earliest origin.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from memo.events import CounterEvent, Lane, Note, Span, Stall, TierName
from memo.trace.intervals import pack_rows
from memo.trace.reader import Trace
from memo.trace.stats import COPY_LANES
from memo.trace.tensor_lifetimes import TensorLifetime, lifetimes_of, residency_changes

_STALLS = "stalls"
_LANE_NAMES = [lane.value for lane in Lane]
_LANE_NAMES.insert(1, _STALLS)
_ROWS = 1_000_000  # tids reserved for each lane


def chrome_trace(traces: Sequence[Trace]) -> dict[str, Any]:
    """Converts the traces of all ranks to one Chrome trace in object form, ready for json."""
    origin = min((trace.origin_unix_ns for trace in traces), default=0)
    events = [event for trace in traces for event in _Rank(trace, trace.origin_unix_ns - origin).events()]
    remarks = [f"rank {trace.rank}: {remark}" for trace in traces for remark in trace.remarks]
    other = {"source": "memo-trace", "remarks": remarks, "meta": traces[0].meta if traces else {}}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


class _Rank:
    """One rank's events."""

    def __init__(self, trace: Trace, shift_ns: int) -> None:
        self._trace = trace
        self._shift = shift_ns
        self._lives = lifetimes_of(trace.events)
        self._modules = {life.id: life.module for life in self._lives}
        self._tid_of_span: dict[int, int] = {}  # by id(span): the row of each span, for flows

    def events(self) -> Iterator[dict[str, Any]]:
        by_lane = self._by_lane()
        yield self._meta("process_name", 0, {"name": f"rank {self._trace.rank}"})
        yield self._meta("process_sort_index", 0, {"sort_index": self._trace.rank})
        for place, lane in enumerate(_LANE_NAMES):
            yield from self._lane(place, lane, by_lane[lane])
        yield from self._instants()
        yield from self._counters()
        for number, life in enumerate(self._lives):
            yield from self._flow(number, life)

    def _by_lane(self) -> dict[str, list[Span | Stall]]:
        by_lane: dict[str, list[Span | Stall]] = collections.defaultdict(list)
        for event in self._trace.events:
            if isinstance(event, Span):
                by_lane[event.lane.value].append(event)
            elif isinstance(event, Stall):
                by_lane[_STALLS].append(event)
        return by_lane

    def _lane(self, place: int, lane: str, spans: Sequence[Span | Stall]) -> Iterator[dict[str, Any]]:
        rows = pack_rows([(span.t, span.t + span.d) for span in spans])
        for row in sorted(set(rows)):
            tid = place * _ROWS + row
            yield self._meta("thread_name", tid, {"name": lane if row == 0 else f"{lane} {row}"})
            yield self._meta("thread_sort_index", tid, {"sort_index": tid})
        for span, row in zip(spans, rows, strict=True):
            tid = place * _ROWS + row
            self._tid_of_span[id(span)] = tid
            yield self._at(span.t, tid) | {
                "ph": "X",
                "dur": span.d / 1000,
                "name": self._name(span),
                "cat": lane,
                "args": self._arguments(span),
            }

    def _name(self, span: Span | Stall) -> str:
        module = span.module or self._modules.get(-1 if span.id is None else span.id, "")
        if isinstance(span, Stall):
            return f"{span.cause.value} stall {module}".rstrip()
        return " ".join(filter(None, (module, span.phase))) or span.lane.value

    def _arguments(self, span: Span | Stall) -> dict[str, Any]:
        found: dict[str, Any] = {"step": span.step}
        if span.id is not None:
            found["id"] = span.id
        if isinstance(span, Stall):
            return found | {"cause": span.cause.value}
        if span.nbytes is not None:
            found["nbytes"] = span.nbytes
            if span.decoded_nbytes is not None:
                found["decoded_nbytes"] = span.decoded_nbytes
            if span.d:
                found["bytes_per_s"] = round(span.nbytes / span.d * 1e9)
        return found

    def _instants(self) -> Iterator[dict[str, Any]]:
        for event in self._trace.events:
            if isinstance(event, Stall):
                said = {"name": f"{event.cause.value} stall", "args": {"ms": event.d / 1e6}}
            elif isinstance(event, Note):
                said = {"name": event.cause, "args": {"message": event.message}}
            else:
                continue
            yield self._at(event.t, 0) | said | {"ph": "i", "s": "t", "cat": "note"}

    def _counters(self) -> Iterator[dict[str, Any]]:
        held = dict.fromkeys(TierName, 0)
        changes = residency_changes(self._lives)
        for (t, tier), group in itertools.groupby(changes, key=lambda change: (change.t, change.tier)):
            held[tier] += sum(change.delta for change in group)
            yield self._counter(t, f"{tier} saved", held[tier])
        for event in self._trace.events:
            if isinstance(event, CounterEvent):
                yield self._counter(event.t, f"{event.tier} measured", event.nbytes)
        yield from self._in_flight()

    def _in_flight(self) -> Iterator[dict[str, Any]]:
        copies = [event for event in self._trace.events if isinstance(event, Span) and event.lane in COPY_LANES]
        ends = [(span.t + span.d, -(span.nbytes or 0)) for span in copies]
        flying = 0
        for t, delta in sorted([(span.t, span.nbytes or 0) for span in copies] + ends):
            flying += delta
            yield self._counter(t, "in flight", flying)

    def _counter(self, t: int, name: str, nbytes: int) -> dict[str, Any]:
        return self._at(t, 0) | {"ph": "C", "name": name, "args": {"bytes": nbytes}}

    def _flow(self, number: int, life: TensorLifetime) -> Iterator[dict[str, Any]]:
        """Arrows from copy to copy of a storage; viewers need each end to lie within its span."""
        copies = [span for span in life.moves if span.lane in COPY_LANES]
        if len(copies) < 2:
            return
        for place, span in enumerate(copies):
            phase = "s" if place == 0 else "f" if place == len(copies) - 1 else "t"
            event = self._at(span.t, self._tid_of_span[id(span)]) | {
                "ph": phase,
                "id": self._trace.rank * 2**40 + number,
                "name": "way",
                "cat": "flow",
            }
            yield event | {"bp": "e"} if phase == "f" else event

    def _at(self, t: int, tid: int) -> dict[str, Any]:
        return {"pid": self._trace.rank, "tid": tid, "ts": (t + self._shift) / 1000}

    def _meta(self, name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "pid": self._trace.rank, "tid": tid, "name": name, "args": args}
