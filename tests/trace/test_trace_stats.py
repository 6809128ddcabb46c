"""Figures of a trace that fits on a page, each compared with the arithmetic beside it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

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
from memo.trace import StepStats, Trace
from memo.trace.figures import to_json
from memo.trace.stats import prediction_of, rank_stats, representative_step

MakeTrace = Callable[..., Trace]
S = TensorState
META = {
    "budgets": {"device": 300, "host": 1000},
    "link_bytes_per_s": {"d2h": 20e9},
    "plan": {"predicted_peak_nbytes": {"host": 90}},
}

#        0        10        20        30   35   40        50        60
# comp   |--fwd 0--|--fwd 1--|              |recompute|----bwd----|
# d2h              |-----|                                           100 bytes in 6 ns
# h2d                             |--------|                         100 bytes in 10 ns
# stall                              |-----|                         5 ns for the reload
EVENTS: list[Event] = [
    StepMark(t=0, step=0, phase="begin"),
    Span(t=0, d=10, step=0, lane=Lane.COMPUTE, module="layers.0", phase="forward"),
    Span(t=10, d=10, step=0, lane=Lane.COMPUTE, module="layers.1", phase="forward"),
    StateChange(t=5, step=0, id=1, to=S.LIVE, nbytes=100, module="layers.0.mlp"),
    StateChange(t=10, step=0, id=1, to=S.LEAVING, nbytes=100, tier=TierName.HOST),
    Span(t=10, d=6, step=0, lane=Lane.D2H, id=1, nbytes=100),
    StateChange(t=16, step=0, id=1, to=S.AWAY, nbytes=100, tier=TierName.HOST),
    StateChange(t=25, step=0, id=1, to=S.RETURNING, nbytes=100, tier=TierName.HOST),
    Span(t=25, d=10, step=0, lane=Lane.H2D, id=1, nbytes=100),
    Stall(t=30, d=5, step=0, cause=StallCause.RELOAD, module="layers.0", id=1),
    StorageUse(t=30, step=0, id=1, how=UseKind.PREFETCHED),
    StorageUse(t=36, step=0, id=2, how=UseKind.FETCHED),
    StorageUse(t=36, step=0, id=3, how=UseKind.LIVE),
    StateChange(t=35, step=0, id=1, to=S.BACK, nbytes=100, tier=TierName.HOST),
    Span(t=35, d=5, step=0, lane=Lane.RECOMPUTE, module="layers.0", phase="backward"),
    Span(t=40, d=10, step=0, lane=Lane.COMPUTE, module="layers.0", phase="backward"),
    CounterEvent(t=40, step=0, tier=TierName.DEVICE, nbytes=250),
    StateChange(t=50, step=0, id=1, to=S.GONE, nbytes=100),
    StepMark(t=60, step=0, phase="end"),
]


@pytest.fixture
def step(make_trace: MakeTrace) -> StepStats:
    return rank_stats(make_trace(EVENTS, meta=META)).steps[0]


def test_times(step: StepStats) -> None:
    assert step.duration_ns == 60
    assert step.forward_ns == 20
    assert step.backward_ns == 5 + 10
    assert step.recompute_ns == 5
    assert step.stall_ns == 5
    assert step.added_ns == 5 + 5
    assert step.added_percent == pytest.approx(100 * 10 / (60 - 10))


def test_a_copy_is_hidden_only_under_running_compute(step: StepStats) -> None:
    assert step.copy_ns == 6 + 10
    assert step.hidden_ns == 6  # all of the copy out, and none of the copy in: no span is open from 25 to 35
    assert step.overlap_percent == pytest.approx(100 * 6 / 16)


def test_a_stall_inside_a_layers_span_hides_nothing(make_trace: MakeTrace) -> None:
    wide = Span(t=20, d=20, step=0, lane=Lane.COMPUTE, module="layers.0", phase="backward")
    step = rank_stats(make_trace([*EVENTS, wide])).steps[0]
    assert step.hidden_ns == 6 + 5  # the copy in from 25 to 30; from 30 to 35 the layer itself waits


def test_a_lanes_queue_has_what_was_issued_and_has_not_arrived(make_trace: MakeTrace) -> None:
    events: list[Event] = [StepMark(t=0, step=0, phase="begin")]
    for number, issued in enumerate((1, 2, 30)):  # each is written in 10 ns, one after the other
        events.append(StateChange(t=issued, step=0, id=number, to=S.LEAVING, nbytes=100, tier=TierName.DISK))
        start = max(issued, 1 + 10 * number)
        events.append(Span(t=start, d=10, step=0, lane=Lane.DISK_WRITE, id=number, nbytes=100))
    events.append(Span(t=60, d=5, step=0, lane=Lane.DISK_READ, nbytes=70))
    d2h, _, write, read = rank_stats(make_trace(events)).steps[0].lanes
    assert (d2h.queue_nbytes, write.queue_nbytes, read.queue_nbytes) == (0, 200, 70)


def test_lanes(step: StepStats) -> None:
    d2h, h2d, *disk = step.lanes
    assert (d2h.lane, d2h.copies, d2h.nbytes, d2h.busy_ns) == (Lane.D2H, 1, 100, 6)
    assert d2h.bytes_per_s == pytest.approx(100 / 6e-9)
    assert d2h.link_bytes_per_s == 20e9
    assert d2h.forward_busy_percent == pytest.approx(100 * 6 / 20)
    assert h2d.backward_busy_percent == 0
    assert h2d.link_bytes_per_s is None
    assert all(lane.copies == 0 and lane.bytes_per_s is None for lane in disk)


def test_stalls_and_prefetches(step: StepStats) -> None:
    (stall,) = step.stalls
    assert (stall.cause, stall.count, stall.total_ns, stall.longest_ns) == (StallCause.RELOAD, 1, 5, 5)
    prefetch = step.prefetch
    assert (prefetch.prefetched, prefetch.fetched, prefetch.live, prefetch.late) == (1, 1, 1, 1)
    assert prefetch.hit_percent == 50  # the live one counts neither way


def test_peaks(step: StepStats) -> None:
    device, host, disk = step.peaks
    assert (device.saved_nbytes, device.at_ns, device.measured_nbytes, device.budget_nbytes) == (100, 5, 250, 300)
    assert device.used_nbytes == 250
    assert (host.saved_nbytes, host.at_ns, host.budget_nbytes, host.predicted_nbytes) == (100, 10, 1000, 90)
    assert disk.saved_nbytes == 0


def test_a_peak_counts_what_a_step_inherits(make_trace: MakeTrace) -> None:
    events: list[Event] = [
        StateChange(t=0, step=0, id=1, to=S.LIVE, nbytes=70),
        StateChange(t=10, step=1, id=2, to=S.LIVE, nbytes=5),
        StateChange(t=20, step=2, id=1, to=S.GONE, nbytes=70),
    ]
    second = rank_stats(make_trace(events)).steps[1]
    assert second.peaks[0].saved_nbytes == 75


def test_the_worst_layers_are_those_that_cost_time(step: StepStats) -> None:
    (worst,) = step.worst_layers
    assert (worst.layer, worst.stall_ns, worst.recompute_ns, worst.moved_nbytes) == ("layers.0", 5, 5, 200)


def test_a_stall_without_a_module_counts_for_its_tensors_layer(make_trace: MakeTrace) -> None:
    events: list[Event] = [
        StateChange(t=0, step=0, id=0, to=S.LIVE, nbytes=1, module="layers.9.x"),
        Stall(t=1, d=3, step=0, cause=StallCause.DRAIN, id=0),
    ]
    assert rank_stats(make_trace(events)).steps[0].worst_layers[0].layer == "layers.9"


def marks(step: int, begin: int, end: int | None) -> list[Event]:
    found: list[Event] = [
        StepMark(t=begin, step=step, phase="begin"),
        StorageUse(t=begin + 1, step=step, id=1, how=UseKind.LIVE),
    ]
    return found if end is None else [*found, StepMark(t=end, step=step, phase="end")]


def test_the_representative_step_is_the_median_of_complete_later_ones(make_trace: MakeTrace) -> None:
    events = (
        marks(0, 0, 900) + marks(1, 1000, 1030) + marks(2, 2000, 2010) + marks(3, 3000, 3020) + marks(4, 4000, None)
    )
    assert representative_step(rank_stats(make_trace(events))).step == 3


def test_a_step_that_only_began_is_no_step(make_trace: MakeTrace) -> None:
    events = [*marks(0, 0, 9), StepMark(t=10, step=1, phase="begin")]
    assert [step.step for step in rank_stats(make_trace(events)).steps] == [0]


def test_an_empty_trace_has_figures(make_trace: MakeTrace) -> None:
    stats = rank_stats(make_trace([]))
    assert stats.steps == ()
    assert representative_step(stats).duration_ns == 0
    assert json.loads(json.dumps(to_json(stats.total)))["overlap_percent"] is None


@pytest.mark.parametrize("plan", [None, 3, {}, {"predicted_peak_nbytes": 4}, {"predicted_peak_nbytes": {"host": "x"}}])
def test_a_plan_without_predicted_peaks_has_no_prediction(plan: object) -> None:
    assert prediction_of({"plan": plan}) == {}


@pytest.mark.parametrize(("link", "shown"), [(16e9, 16e9), (5e9, None)])
def test_copies_faster_than_the_link_show_no_share_of_it(
    link: float, shown: float | None, make_trace: MakeTrace
) -> None:
    stats = rank_stats(make_trace(EVENTS, meta={"link_bytes_per_s": {"d2h": link}}))
    (d2h,) = [lane for lane in stats.total.lanes if lane.lane is Lane.D2H]
    assert d2h.bytes_per_s == pytest.approx(100 / 6e-9)
    assert d2h.link_bytes_per_s == shown
