"""The Chrome trace: what viewers require of it, checked event by event since no viewer runs here."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import given, settings, strategies as st

from memo.events import Event, Lane, Span, Stall, StallCause, StateChange, TensorState, TierName
from memo.trace import Trace, chrome_trace, read_traces

MakeTrace = Callable[..., Trace]
TIMES = st.integers(0, 10_000)
SPANS = st.builds(
    Span, t=TIMES, d=st.integers(0, 2_000), step=st.just(0), lane=st.sampled_from(Lane), id=st.integers(0, 9)
)
STALLS = st.builds(Stall, t=TIMES, d=st.integers(0, 500), step=st.just(0), cause=st.sampled_from(StallCause))


def phases(trace: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == ph]


@settings(deadline=None)
@given(events=st.lists(st.one_of(SPANS, STALLS), max_size=60), shift=st.integers(0, 10**12))
def test_complete_events_of_one_row_never_overlap(events: list[Event], shift: int) -> None:
    traces = [
        Trace(
            path="t",
            rank=rank,
            world_size=2,
            origin_unix_ns=rank * shift,
            meta={},
            events=tuple(sorted(events, key=lambda event: event.t)),
            dropped=0,
        )
        for rank in range(2)
    ]
    rows = collections.defaultdict(list)
    for event in phases(chrome_trace(traces), "X"):
        start = round(event["ts"] * 1000)
        rows[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    assert sum(map(len, rows.values())) == 2 * len(events)
    for row in rows.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(row)))


def test_a_realistic_run_has_what_viewers_require(synthetic: ModuleType, tmp_path: Path) -> None:
    workload = synthetic.Workload(layers=6, steps=2, late_layer=3)
    paths = [tmp_path / f"{rank}.jsonl" for rank in range(2)]
    for rank, path in enumerate(paths):
        synthetic.write(path, workload, rank=rank, world_size=2)
    trace = json.loads(json.dumps(chrome_trace(read_traces(paths)), allow_nan=False))

    assert trace.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert event["ph"] in "XiCstfM"
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["ph"] == "M" or event["ts"] >= 0
        assert all(type(value) is int for value in event["args"].values()) if event["ph"] == "C" else True
    named = {(event["pid"], event["tid"]) for event in phases(trace, "M") if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in phases(trace, "X")} <= named
    assert {event["name"] for event in phases(trace, "C")} == {
        f"{tier} {what}" for tier in TierName for what in ("saved", "measured")
    } | {"in flight"}
    assert {event["name"] for event in phases(trace, "i")} >= {"reload stall", "fallback"}


def test_a_flow_goes_from_copy_to_copy_and_each_end_lies_on_its_span(synthetic: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    synthetic.write(path, synthetic.Workload(layers=3, steps=1))
    trace = chrome_trace(read_traces([path]))
    starts = {(event["pid"], event["tid"], event["ts"]) for event in phases(trace, "X")}
    flows = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            assert (event["pid"], event["tid"], event["ts"]) in starts
            flows[event["id"]].append(event["ph"])
    assert len(flows) == 3 * 6  # a storage each
    assert set(map("".join, flows.values())) == {"sf", "sttf"}  # by the host, and by the disk


def test_what_is_in_flight_ends_at_nothing(make_trace: MakeTrace) -> None:
    spans = [Span(t=t, d=5, step=0, lane=Lane.D2H, id=t, nbytes=10) for t in (0, 3, 9)]
    trace = chrome_trace([make_trace(spans)])
    flying = [event["args"]["bytes"] for event in phases(trace, "C") if event["name"] == "in flight"]
    assert max(flying) == 20
    assert flying[-1] == 0


def test_ranks_share_the_axis_of_the_earliest(make_trace: MakeTrace) -> None:
    span = Span(t=7_000, d=1, step=0, lane=Lane.COMPUTE)
    trace = chrome_trace(
        [make_trace([span], origin_unix_ns=10**18 + 2_000), make_trace([span], rank=1, origin_unix_ns=10**18)]
    )
    assert {event["pid"]: event["ts"] for event in phases(trace, "X")} == {0: 9.0, 1: 7.0}


def test_counters_follow_the_states(make_trace: MakeTrace) -> None:
    events = [
        StateChange(t=0, step=0, id=1, to=TensorState.LIVE, nbytes=64),
        StateChange(t=0, step=0, id=2, to=TensorState.LIVE, nbytes=8),
        StateChange(t=9, step=0, id=1, to=TensorState.GONE, nbytes=64),
    ]
    counters = [event for event in phases(chrome_trace([make_trace(events)]), "C") if event["name"] == "device saved"]
    assert [event["args"]["bytes"] for event in counters] == [72, 8]
