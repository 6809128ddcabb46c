"""Statistics of traces: the figures of each rank and step, which report and verdict show.

Pure functions from traces to the dataclasses of `memo.trace.figures`. docs/trace-format.md defines each figure; these
definitions are choices:

- Compute is running while a compute or recompute span is open and no stall is: a layer's span may contain its waits.
- A copy is hidden while compute is running; `overlap_percent` is hidden copy time over all copy time, lanes united.
- A rate is bytes over the time the lane was busy, not over the step, so that it compares with the measured link.
- A copy is queued from the time its storage is `leaving` or `returning`, and until it has ended.
- A prefetch is hit when a reload had been issued before backward asked; uses that found the live source count apart.
- Added time is stalls and recompute: what this step would not have spent had everything stayed on the device.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memo.events import (
    CounterEvent,
    Event,
    Lane,
    Span,
    Stall,
    StallCause,
    StateChange,
    StepMark,
    StorageUse,
    TensorState,
    TierName,
    UseKind,
)
from memo.trace.figures import LaneStats, LayerCost, PrefetchStats, RankStats, StallStats, StepStats, TierPeak
from memo.trace.intervals import Interval, intersection, length, subtraction, union
from memo.trace.reader import Trace
from memo.trace.tensor_lifetimes import TensorLifetime, layer_of, lifetimes_of, residency_changes

IssueTimes = Mapping[tuple[TensorState, int], Sequence[int]]
COPY_LANES = (Lane.D2H, Lane.H2D, Lane.DISK_WRITE, Lane.DISK_READ)
_WORST_LAYERS = 5
MOST_OF_LINK = 1.1
"""Copies that reach more than this times their link's rate used another link than was measured, such as a page cache."""


def rank_stats(trace: Trace, *, lifetimes: Sequence[TensorLifetime] | None = None) -> RankStats:
    """Computes every figure of one rank's trace.

    Args:
        trace: the rank's trace.
        lifetimes: of its storages, if they are known already.
    """
    residence = _Residence(trace, lifetimes_of(trace.events) if lifetimes is None else lifetimes)
    by_step: dict[int, list[Event]] = collections.defaultdict(list)
    for event in trace.events:
        by_step[event.step].append(event)
    for step in [step for step, events in by_step.items() if all(map(_is_begin, events))]:
        del by_step[step]  # a step that had only begun when the run ended
    steps = tuple(_measure(trace, residence, events, step=step) for step, events in sorted(by_step.items()))
    return RankStats(rank=trace.rank, steps=steps, total=_measure(trace, residence, trace.events, step=None))


def _is_begin(event: Event) -> bool:
    return isinstance(event, StepMark) and event.phase == "begin"


def representative_step(stats: RankStats) -> StepStats:
    """Returns the step of median duration, without the first one (warm-up) and unfinished ones if there are others."""
    later = [step for step in stats.steps[1:] if step.complete]
    steps = later or [step for step in stats.steps if step.complete] or list(stats.steps)
    if not steps:
        return stats.total
    by_duration = sorted(steps, key=lambda step: (step.duration_ns, step.step))
    return by_duration[len(by_duration) // 2]


def prediction_of(meta: Mapping[str, Any]) -> dict[TierName, int]:
    """Predicted peak in bytes by tier: `plan.predicted_peak_nbytes` of the header."""
    plan = meta.get("plan")
    return _naturals_by(TierName, plan.get("predicted_peak_nbytes") if isinstance(plan, dict) else None)


def _naturals_by(keys: type[Any], found: object) -> dict[Any, int]:
    """Positive numbers by known key of a free-form object; a header's meta is not trusted."""
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in keys if type(found.get(key)) in (int, float) and found[key] > 0}


class _Residence:
    """Bytes of saved storages in each tier over time, and their peaks within a window."""

    def __init__(self, trace: Trace, lifetimes: Sequence[TensorLifetime]) -> None:
        self.module_of = {life.id: life.module for life in lifetimes}
        self._times: dict[TierName, list[int]] = {tier: [] for tier in TierName}
        self._totals: dict[TierName, list[int]] = {tier: [] for tier in TierName}
        held = dict.fromkeys(TierName, 0)
        for change in residency_changes(lifetimes):
            held[change.tier] += change.delta
            self._times[change.tier].append(change.t)
            self._totals[change.tier].append(held[change.tier])
        self._budgets = _naturals_by(TierName, trace.meta.get("budgets"))
        self._predicted = prediction_of(trace.meta)

    def peaks(self, window: Interval, counters: Mapping[TierName, int]) -> tuple[TierPeak, ...]:
        return tuple(self._peak(tier, window, counters.get(tier)) for tier in TierName)

    def _peak(self, tier: TierName, window: Interval, measured: int | None) -> TierPeak:
        times, totals = self._times[tier], self._totals[tier]
        first = bisect.bisect_right(times, window[0]) - 1  # bytes held when the window opens
        last = bisect.bisect_right(times, window[1])
        saved, at = 0, window[0]
        for index in range(max(first, 0), last):
            if totals[index] > saved:
                saved, at = totals[index], max(times[index], window[0])
        return TierPeak(
            tier=tier,
            saved_nbytes=saved,
            at_ns=at,
            measured_nbytes=measured,
            budget_nbytes=self._budgets.get(tier),
            predicted_nbytes=self._predicted.get(tier),
        )


def _measure(trace: Trace, residence: _Residence, events: Sequence[Event], *, step: int | None) -> StepStats:
    spans: dict[Lane, list[Span]] = {lane: [] for lane in Lane}
    stalls: list[Stall] = []
    collectives: list[Stall] = []
    uses: list[StorageUse] = []
    counters: dict[TierName, int] = {}
    for event in events:
        if isinstance(event, Span):
            spans[event.lane].append(event)
        elif isinstance(event, Stall):
            (collectives if event.cause is StallCause.COLLECTIVE else stalls).append(event)
        elif isinstance(event, StorageUse):
            uses.append(event)
        elif isinstance(event, CounterEvent):
            counters[event.tier] = max(counters.get(event.tier, 0), event.nbytes)
    window, complete = _window(events)
    waits, exchanges = _union_of(stalls), _union_of(collectives)
    recompute = _union_of(spans[Lane.RECOMPUTE])
    running = subtraction(_union_of([*spans[Lane.COMPUTE], *spans[Lane.RECOMPUTE]]), union([*waits, *exchanges]))
    forward = _union_of(span for span in spans[Lane.COMPUTE] if span.phase == "forward")
    backward = _union_of(span for span in [*spans[Lane.COMPUTE], *spans[Lane.RECOMPUTE]] if span.phase == "backward")
    copying = _union_of(itertools.chain.from_iterable(spans[lane] for lane in COPY_LANES))
    hidden = length(intersection(copying, running))
    duration = window[1] - window[0]
    added = length(union([*waits, *recompute]))
    issued = issue_times(events)
    links = _naturals_by(Lane, trace.meta.get("link_bytes_per_s"))
    return StepStats(
        rank=trace.rank,
        step=step,
        complete=complete,
        start_ns=window[0],
        duration_ns=duration,
        forward_ns=length(forward),
        backward_ns=length(backward),
        compute_ns=length(running),
        recompute_ns=length(recompute),
        stall_ns=length(waits),
        communication_ns=length(exchanges),
        added_ns=added,
        added_percent=_percent(added, duration - added),
        copy_ns=length(copying),
        hidden_ns=hidden,
        overlap_percent=_percent(hidden, length(copying)),
        lanes=tuple(
            _lane_stats(lane, spans[lane], issued, running, forward, backward, links.get(lane)) for lane in COPY_LANES
        ),
        stalls=_stall_stats(stalls),
        prefetch=_prefetch_stats(uses, stalls),
        peaks=residence.peaks(window, counters),
        worst_layers=_worst_layers(stalls, spans, residence),
    )


def _window(events: Sequence[Event]) -> tuple[Interval, bool]:
    """(first begin, last end) of the events, and whether both marks are there; else the first or last event counts."""
    marks = [event for event in events if isinstance(event, StepMark)]
    begins = [mark.t for mark in marks if mark.phase == "begin"]
    ends = [mark.t for mark in marks if mark.phase == "end"]
    start = min(begins) if begins else min((event.t for event in events), default=0)
    complete = len(ends) >= len(begins) > 0
    end = max(ends) if complete else max((event.t + getattr(event, "d", 0) for event in events), default=start)
    return (start, max(start, end)), complete


def _union_of(spans: Iterable[Span | Stall]) -> list[Interval]:
    return union((span.t, span.t + span.d) for span in spans)


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole > 0 else None


def _lane_stats(
    lane: Lane,
    spans: Sequence[Span],
    issued: IssueTimes,
    running: Sequence[Interval],
    forward: Sequence[Interval],
    backward: Sequence[Interval],
    link: float | None,
) -> LaneStats:
    busy = _union_of(spans)
    nbytes = sum(span.nbytes or 0 for span in spans)
    reached = nbytes / length(busy) * 1e9 if busy and nbytes else None
    if link is not None and reached is not None and reached > MOST_OF_LINK * link:
        link = None
    return LaneStats(
        lane=lane,
        copies=len(spans),
        nbytes=nbytes,
        busy_ns=length(busy),
        hidden_ns=length(intersection(busy, running)),
        forward_busy_percent=_percent(length(intersection(busy, forward)), length(forward)),
        backward_busy_percent=_percent(length(intersection(busy, backward)), length(backward)),
        bytes_per_s=reached,
        queue_nbytes=max((nbytes for _, nbytes in queued_bytes(lane, spans, issued)), default=0),
        link_bytes_per_s=link,
    )


def issue_times(events: Iterable[Event]) -> IssueTimes:
    """Times at which each storage changed its state, by the state and the storage."""
    found: dict[tuple[TensorState, int], list[int]] = collections.defaultdict(list)
    for event in events:
        if isinstance(event, StateChange):
            found[event.to, event.id].append(event.t)
    return found


def queued_bytes(lane: Lane, spans: Iterable[Span], issued: IssueTimes) -> list[tuple[int, int]]:
    """Times, and bytes from then on whose copy was issued, by the latest such state of the storage, and had not ended."""
    state = TensorState.LEAVING if lane in (Lane.D2H, Lane.DISK_WRITE) else TensorState.RETURNING
    changes: dict[int, int] = collections.defaultdict(int)
    for span in spans:
        times = issued.get((state, -1 if span.id is None else span.id), ())
        place = bisect.bisect_right(times, span.t)
        changes[times[place - 1] if place else span.t] += span.nbytes or 0
        changes[span.t + span.d] -= span.nbytes or 0
    ordered = sorted(changes)
    return list(zip(ordered, itertools.accumulate(changes[t] for t in ordered), strict=True))


def _stall_stats(stalls: Sequence[Stall]) -> tuple[StallStats, ...]:
    by_cause: dict[StallCause, list[int]] = collections.defaultdict(list)
    for stall in stalls:
        by_cause[stall.cause].append(stall.d)
    found = (
        StallStats(cause=cause, count=len(times), total_ns=sum(times), longest_ns=max(times))
        for cause, times in by_cause.items()
    )
    return tuple(sorted(found, key=lambda one: (-one.total_ns, one.cause)))


def _prefetch_stats(uses: Sequence[StorageUse], stalls: Sequence[Stall]) -> PrefetchStats:
    count = collections.Counter(use.how for use in uses)
    waited = {stall.id for stall in stalls if stall.cause is StallCause.RELOAD and stall.d > 0}
    prefetched, fetched = count[UseKind.PREFETCHED], count[UseKind.FETCHED]
    return PrefetchStats(
        prefetched=prefetched,
        fetched=fetched,
        live=count[UseKind.LIVE],
        late=sum(use.how is UseKind.PREFETCHED and use.id in waited for use in uses),
        hit_percent=_percent(prefetched, prefetched + fetched),
    )


def _worst_layers(
    stalls: Sequence[Stall], spans: Mapping[Lane, Sequence[Span]], residence: _Residence
) -> tuple[LayerCost, ...]:
    """Layers that cost most time; a stall without a module counts for its tensor's."""
    stalled: collections.Counter[str] = collections.Counter()
    recomputed: collections.Counter[str] = collections.Counter()
    moved: collections.Counter[str] = collections.Counter()
    for stall in stalls:
        stalled[layer_of(stall.module or residence.module_of.get(-1 if stall.id is None else stall.id, ""))] += stall.d
    for span in spans[Lane.RECOMPUTE]:
        recomputed[layer_of(span.module or "")] += span.d
    for span in itertools.chain.from_iterable(spans[lane] for lane in COPY_LANES):
        moved[layer_of(residence.module_of.get(span.id if span.id is not None else -1, ""))] += span.nbytes or 0
    costs = (
        LayerCost(layer=layer, stall_ns=stalled[layer], recompute_ns=recomputed[layer], moved_nbytes=moved[layer])
        for layer in {*stalled, *recomputed}
    )
    ranked = sorted(costs, key=lambda cost: (-cost.stall_ns - cost.recompute_ns, cost.layer))
    return tuple(ranked[:_WORST_LAYERS])
