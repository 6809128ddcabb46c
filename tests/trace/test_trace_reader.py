"""The reader takes what a run writes, and refuses everything else in one line, quickly and within bounds."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memo.errors import TraceError
from memo.events import (
    CounterEvent,
    Event,
    Lane,
    Note,
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
from memo.trace import read_traces
from memo.trace.reader import TraceLimits, read_trace

ONE_OF_EACH: list[Event] = [
    StepMark(t=0, step=0, phase="begin"),
    StateChange(t=1, step=0, id=7, to=TensorState.LIVE, nbytes=64, module="layers.0", shape=(2, 4), dtype="bfloat16"),
    StateChange(t=2, step=0, id=7, to=TensorState.LEAVING, nbytes=64, tier=TierName.HOST),
    Span(t=3, d=4, step=0, lane=Lane.D2H, id=7, nbytes=64),
    Span(t=3, d=9, step=0, lane=Lane.COMPUTE, module="layers.0", phase="forward"),
    Stall(t=8, d=2, step=0, cause=StallCause.RELOAD, id=7),
    StorageUse(t=9, step=0, id=7, how=UseKind.PREFETCHED),
    CounterEvent(t=10, step=0, tier=TierName.DEVICE, nbytes=1 << 40),
    Note(t=11, step=0, cause="fallback", message="whole tensor"),
    StepMark(t=12, step=0, phase="end"),
]
WriteLines = Callable[..., Path]


def test_every_event_survives_the_file(write_lines: WriteLines) -> None:
    trace = read_trace(write_lines(*ONE_OF_EACH))
    assert trace.events == tuple(ONE_OF_EACH)
    assert trace.remarks == ()


def test_events_are_sorted_by_time_though_the_file_is_not(write_lines: WriteLines) -> None:
    trace = read_trace(write_lines(*reversed(ONE_OF_EACH)))
    assert [event.t for event in trace.events] == sorted(event.t for event in ONE_OF_EACH)


def test_a_torn_last_line_is_left_out_and_said(write_lines: WriteLines) -> None:
    path = write_lines(*ONE_OF_EACH, end=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    trace = read_trace(path)
    assert trace.events == tuple(ONE_OF_EACH[:-1])
    assert "torn" in trace.remarks[0]


def test_a_file_may_end_anywhere_in_its_last_line(write_lines: WriteLines) -> None:
    path = write_lines(*ONE_OF_EACH, end=False)
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        assert len(read_trace(path).events) >= len(ONE_OF_EACH) - 1


def test_a_missing_end_line_is_said(write_lines: WriteLines) -> None:
    assert "no end line" in read_trace(write_lines(*ONE_OF_EACH, end=False)).remarks[0]


def test_dropped_events_are_said(write_lines: WriteLines) -> None:
    path = write_lines(ONE_OF_EACH[0], '{"k": "end", "t": 9, "events": 1, "dropped": 1204}', end=False)
    trace = read_trace(path)
    assert trace.dropped == 1204
    assert "1,204 events were dropped" in trace.remarks[0]


def test_an_end_line_that_counts_wrong_is_said(write_lines: WriteLines) -> None:
    path = write_lines(ONE_OF_EACH[0], '{"k": "end", "t": 9, "events": 5, "dropped": 0}', end=False)
    assert "counts 5 events and the file has 1" in read_trace(path).remarks[0]


def test_a_packed_trace_reads_like_a_plain_one(write_lines: WriteLines, tmp_path: Path) -> None:
    packed = tmp_path / "trace.rank0.jsonl.gz"
    packed.write_bytes(gzip.compress(write_lines(*ONE_OF_EACH).read_bytes()))
    assert read_trace(packed).events == tuple(ONE_OF_EACH)


DEEP = "[" * 900 + "]" * 900
VERY_DEEP = "[" * 30_000 + "]" * 30_000
HOSTILE_LINES = {
    "not JSON": '{"k": "use",',
    "no object": "[1, 2]",
    "empty": "",
    "twice": '{"k": "use", "t": 1, "t": 2, "step": 0, "id": 1, "how": "live"}',
    "twice inside": '{"k": "use", "x": {"a": 1, "a": 2}}',
    "NaN": '{"k": "step", "t": NaN, "step": 0, "phase": "end"}',
    "Infinity": '{"k": "step", "t": Infinity, "step": 0, "phase": "end"}',
    "1e999": '{"k": "step", "t": 1e999, "step": 0, "phase": "end"}',
    "float": '{"k": "step", "t": 1.5, "step": 0, "phase": "end"}',
    "true": '{"k": "step", "t": true, "step": 0, "phase": "end"}',
    "null": '{"k": "step", "t": null, "step": 0, "phase": "end"}',
    "negative": '{"k": "step", "t": -1, "step": 0, "phase": "end"}',
    "beyond 2^63": '{"k": "step", "t": 9223372036854775808, "step": 0, "phase": "end"}',
    "5000 digits": '{"k": "step", "t": ' + "9" * 5000 + ', "step": 0, "phase": "end"}',
    "ends beyond 2^63": '{"k": "span", "t": 9223372036854775807, "d": 9, "step": 0, "lane": "d2h"}',
    "deep": '{"k": ' + DEEP + "}",
    "very deep": '{"k": ' + VERY_DEEP + "}",
    "unknown kind": '{"k": "exec", "t": 1, "step": 0}',
    "kind is a list": '{"k": ["use"], "t": 1}',
    "no kind": '{"t": 1, "step": 0}',
    "unknown field": '{"k": "step", "t": 1, "step": 0, "phase": "end", "path": "../../etc/passwd"}',
    "missing field": '{"k": "step", "t": 1, "step": 0}',
    "unknown lane": '{"k": "span", "t": 1, "d": 1, "step": 0, "lane": "warp"}',
    "lane is a list": '{"k": "span", "t": 1, "d": 1, "step": 0, "lane": ["d2h"]}',
    "shape is text": '{"k": "state", "t": 1, "step": 0, "id": 1, "to": "live", "nbytes": 1, "shape": "3"}',
    "shape is negative": '{"k": "state", "t": 1, "step": 0, "id": 1, "to": "live", "nbytes": 1, "shape": [-3]}',
    "too long": '{"k": "note", "t": 1, "step": 0, "cause": "c", "message": "' + "x" * 70_000 + '"}',
    "neither begin nor end": '{"k": "step", "t": 1, "step": 0, "phase": "middle"}',
    "bad end": '{"k": "end", "t": 1, "events": -1, "dropped": 0}',
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_a_hostile_line_is_refused_by_number(line: str, write_lines: WriteLines) -> None:
    path = write_lines(ONE_OF_EACH[0], line, ONE_OF_EACH[-1])
    began = time.thread_time()
    with pytest.raises(TraceError, match=r"line [23]: "):
        read_trace(path)
    assert time.thread_time() - began < 1


HOSTILE_HEADERS = {
    "other format": {"format": "memo-plan"},
    "future": {"version": 2},
    "version is true": {"version": True},
    "version is text": {"version": "1"},
    "rank is text": {"rank": "0"},
    "rank is negative": {"rank": -1},
    "rank outside": {"rank": 4, "world_size": 4},
    "meta is a list": {"meta": []},
    "meta too deep": {"meta": {"a": json.loads("[" * 60 + "]" * 60)}},
    "meta too large": {"meta": {"a": 2**70}},
    "meta NaN": {"meta": {"a": float("nan")}},
    "meta Infinity": {"meta": {"a": [float("-inf")]}},
    "origin missing": {"origin_unix_ns": None},
}


@pytest.mark.parametrize("header", HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS)
def test_a_hostile_header_is_refused(header: dict[str, object], write_lines: WriteLines) -> None:
    with pytest.raises(TraceError, match="line 1: "):
        read_trace(write_lines(header=header))


def test_a_number_too_large_for_a_float_is_refused_in_the_header(write_lines: WriteLines) -> None:
    path = write_lines(header={"meta": {"a": 12345}})
    path.write_text(path.read_text().replace("12345", "1e999"))
    with pytest.raises(TraceError, match="line 1: the number 1e999 is too large"):
        read_trace(path)


def test_a_header_may_lack_meta_and_meta_may_hold_anything_flat(write_lines: WriteLines) -> None:
    assert read_trace(write_lines(header={"meta": {"plan": None, "x": [1.5, "y"]}})).meta == {
        "plan": None,
        "x": [1.5, "y"],
    }


def test_what_follows_the_end_line_is_refused(write_lines: WriteLines) -> None:
    path = write_lines('{"k": "end", "t": 9, "events": 0, "dropped": 0}', ONE_OF_EACH[0], end=False)
    with pytest.raises(TraceError, match="after its end line"):
        read_trace(path)


def test_no_file_a_folder_and_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    for path in (tmp_path / "absent.jsonl", tmp_path, tmp_path / "empty.jsonl"):
        with pytest.raises(TraceError):
            read_trace(path)
    with pytest.raises(TraceError):
        read_traces([])


def test_bytes_that_are_no_text_are_refused(write_lines: WriteLines) -> None:
    path = write_lines(ONE_OF_EACH[0])
    path.write_bytes(path.read_bytes().replace(b"begin", b"\xff\xfe\xff\xfe\xff"))
    with pytest.raises(TraceError, match="UTF-8"):
        read_trace(path)


@pytest.mark.parametrize("line", [b"\0" * (1 << 20), b'{"k": "step", "t": 1, "step": 0, "phase": "end"}\n'])
def test_a_gzip_bomb_is_refused_in_bounded_memory(line: bytes, tmp_path: Path, write_lines: WriteLines) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    header = write_lines(end=False).read_bytes()
    with gzip.open(path, "wb", compresslevel=9) as packed:
        packed.write(header)
        for _ in range(64):
            packed.write(line * max(1, (1 << 20) // len(line)))
    tracemalloc.start()
    began = time.thread_time()
    with pytest.raises(TraceError):
        read_trace(path)
    assert time.thread_time() - began < 5  # some tens of milliseconds without tracemalloc and on an idle machine
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


def test_a_cut_gzip_file_is_refused(tmp_path: Path, write_lines: WriteLines) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(write_lines(*ONE_OF_EACH).read_bytes())[:-12])
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(path)


def test_more_events_than_the_limit_are_refused(write_lines: WriteLines) -> None:
    path = write_lines(*ONE_OF_EACH)
    with pytest.raises(TraceError, match="more than 5 events"):
        read_trace(path, limits=TraceLimits(events=5))


def test_only_the_steps_asked_for_are_kept_and_counted_against_the_limit(write_lines: WriteLines) -> None:
    path = write_lines(*(StepMark(t=t, step=t // 2, phase="begin") for t in range(20)))
    trace = read_trace(path, steps=range(3, 5), limits=TraceLimits(events=4))
    assert [event.t for event in trace.events] == [6, 7, 8, 9]
    assert trace.remarks == ()


def test_two_files_of_one_rank_are_refused(write_lines: WriteLines) -> None:
    paths = [write_lines(*ONE_OF_EACH, name=name) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(TraceError, match="both of rank 0"):
        read_traces(paths)


def test_ranks_come_in_order(write_lines: WriteLines) -> None:
    paths = [write_lines(header={"rank": rank, "world_size": 3}, name=f"{rank}.jsonl") for rank in (2, 0, 1)]
    assert [trace.rank for trace in read_traces(paths)] == [0, 1, 2]


def test_a_control_character_in_a_path_is_escaped_in_the_message(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m.jsonl"
    with pytest.raises(TraceError, match=r"a\\x1b"):
        read_trace(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError):
        read_trace(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_trace_never_raises_anything_else(data: st.DataObject, write_lines: WriteLines) -> None:
    path = write_lines(*ONE_OF_EACH)
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    with contextlib.suppress(TraceError):
        read_trace(path)
