"""Sums of a step's events, on paper."""

from __future__ import annotations

from memo.autoplan.step_timeline import StepTimeline
from memo.events import Lane, Span, Stall, StallCause, StateChange, TensorState


def work(module: str, phase: str, begin: int, end: int, lane: Lane = Lane.COMPUTE) -> Span:
    return Span(t=begin, d=end - begin, step=0, lane=lane, module=module, phase=phase)


def copy(lane: Lane, begin: int, end: int, nbytes: int) -> Span:
    return Span(t=begin, d=end - begin, step=0, lane=lane, id=1, nbytes=nbytes)


def test_a_step_is_added_up_layer_by_layer() -> None:
    timeline = StepTimeline()
    timeline.emit(work("a", "forward", 10, 20))
    timeline.emit(work("b", "forward", 25, 40))
    timeline.emit(work("b", "backward", 50, 80))
    timeline.emit(work("a", "backward", 80, 120))
    timeline.emit(work("a", "backward", 85, 95, Lane.RECOMPUTE))
    timeline.emit(Stall(t=80, d=4, step=0, cause=StallCause.RELOAD, module="a"))
    timeline.emit(Stall(t=41, d=3, step=0, cause=StallCause.DRAIN, module="a"))
    timeline.emit(StateChange(t=11, step=0, id=7, to=TensorState.LIVE, nbytes=64, module="a"))
    timeline.emit(StateChange(t=13, step=0, id=7, to=TensorState.LEAVING, nbytes=64))
    times = timeline.times()
    assert times is not None
    assert list(times.layers) == ["a", "b"]
    a = times.layers["a"]
    assert (a.calls, a.forward_ns, a.backward_ns, a.own_backward_ns, a.saved_bytes) == (1, 10, 40, 26, 64)
    assert (times.first_layer_ns, times.turn_ns, times.end_ns) == (10, (40, 50), 120)
    assert times.stalls_ns == {StallCause.RELOAD: 4, StallCause.DRAIN: 3}


def test_a_wait_within_a_recompute_is_taken_off_once() -> None:
    timeline = StepTimeline()
    timeline.emit(work("a", "forward", 10, 20))
    timeline.emit(work("a", "backward", 80, 120))
    timeline.emit(Stall(t=90, d=3, step=0, cause=StallCause.RELOAD, module="a"))
    timeline.emit(work("a", "backward", 85, 95, Lane.RECOMPUTE))
    times = timeline.times()
    assert times is not None
    assert times.layers["a"].own_backward_ns == 30


def test_a_lane_is_busy_while_any_copy_runs() -> None:
    timeline = StepTimeline()
    for event in (work("a", "forward", 0, 5), work("a", "backward", 5, 90)):
        timeline.emit(event)
    for begin, end in ((10, 20), (15, 25), (12, 13), (40, 50)):
        timeline.emit(copy(Lane.DISK_WRITE, begin, end, 100))
    times = timeline.times()
    assert times is not None
    use = times.lanes[Lane.DISK_WRITE]
    assert (use.nbytes, use.busy_ns) == (400, 25)
    assert use.bytes_per_s == 400 / 25e-9


def test_a_step_without_backward_tells_nothing() -> None:
    timeline = StepTimeline()
    timeline.emit(work("a", "forward", 0, 5))
    assert timeline.times() is None
    timeline.emit(work("a", "backward", 5, 9))
    assert timeline.times() is not None
    timeline.restart()
    assert timeline.times() is None


def test_events_go_on_to_the_trace_that_is_written() -> None:
    class Trace:
        step = 4

        def __init__(self) -> None:
            self.kept: list[object] = []

        def now(self) -> int:
            return 77

        def at(self, monotonic_ns: int) -> int:
            return monotonic_ns - 1000

        def emit(self, event: object) -> None:
            self.kept.append(event)

    trace = Trace()
    timeline = StepTimeline(trace)
    event = work("a", "forward", 0, 5)
    timeline.emit(event)
    assert trace.kept == [event]
    assert (timeline.step, timeline.now(), timeline.at(1500)) == (4, 77, 500)
