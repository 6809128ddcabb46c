"""Memory of a GPU's step is shown when the device computes, not when the host has issued it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from small_models import Stack

import memo
from memo.events import CounterEvent, Lane, Span, StateChange, StepMark, TensorState, TierName
from memo.rehearsal import hugging_face_step, rehearse
from memo.swap.engine.trace_events import TraceEvents
from memo.trace import TraceRecorder, read_traces
from memo.trace.device_clock import on_device_clock


def layer(issued: int, issued_d: int, t: int, d: int) -> Span:
    return Span(
        t=t, d=d, step=0, lane=Lane.COMPUTE, module="layers.0", phase="forward", issued=issued, issued_d=issued_d
    )


def counter(t: int) -> CounterEvent:
    return CounterEvent(t=t, step=0, tier=TierName.DEVICE, nbytes=t)


def test_events_of_the_host_move_in_proportion_to_the_layers_that_were_issued_around_them() -> None:
    spans = [layer(10, 10, 10, 1000), layer(20, 10, 1010, 1000)]
    events = on_device_clock([*spans, counter(5), counter(15), counter(25), counter(30), counter(40), counter(5000)])
    assert [event.t for event in events if isinstance(event, CounterEvent)] == [5, 510, 1510, 2010, 2010, 5000]
    assert [event for event in events if isinstance(event, Span)] == spans


def test_their_order_stays() -> None:
    spans = [layer(10, 10, 100, 50), layer(30, 5, 120, 10)]  # a stream of its own, which ended before the first one
    events = on_device_clock([*spans, *(counter(t) for t in range(0, 60, 3)), StepMark(t=50, step=0, phase="end")])
    counters = [event for event in events if isinstance(event, CounterEvent)]
    assert [event.nbytes for event in counters] == sorted(event.nbytes for event in counters)


def test_where_the_device_is_the_host_nothing_moves() -> None:
    state = StateChange(t=7, step=0, id=1, to=TensorState.LIVE, nbytes=4)
    span = Span(t=1, d=100, step=0, lane=Lane.COMPUTE, module="layers.0", phase="forward")
    assert on_device_clock([state, span, counter(50)]) == [span, state, counter(50)]


def test_a_cpus_trace_has_no_times_of_issue(tmp_path: Path) -> None:
    model, path = Stack(layers=3), tmp_path / "trace.jsonl"
    with memo.offload(model, alpha=1.0, min_bytes="1KiB", host="64MiB", trace=path) as manager:
        model(torch.randint(0, 61, (1, 64))).backward()
    manager.close()
    assert all(event.issued is None for event in read_traces([path])[0].events if isinstance(event, Span))


def test_a_rehearsed_steps_memory_lasts_as_long_as_its_compute(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    build = hugging_face_step({**config, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000})
    rehearse(lambda: build(batch=1, tokens=16384), "rtx4090", steps=2, trace=str(path))
    events = read_traces([path])[0].events
    spans = [event for event in events if isinstance(event, Span) and event.lane is Lane.COMPUTE and event.step == 1]
    states = [event for event in events if isinstance(event, StateChange) and event.step == 1]
    computed = max(span.t + span.d for span in spans) - min(span.t for span in spans)
    issued = max(span.issued or 0 for span in spans) - min(span.issued or 0 for span in spans)
    assert issued < 0.5 * computed
    assert 0.8 * computed < states[-1].t - states[0].t < 1.3 * computed


def test_some_steps_alone_are_placed_as_among_all(tmp_path: Path) -> None:
    """A host that is a step ahead writes a step's layers in the next one."""
    recorder = TraceRecorder(tmp_path / "t.jsonl", rank=0, world_size=1, meta={})
    for step in range(4):
        recorder.step = step
        recorder.emit(CounterEvent(t=1000 + 10 * step, step=step, tier=TierName.DEVICE, nbytes=step))
        span = layer(1000 + 10 * step, 9, 2000 + 1000 * step, 900)
        recorder.emit(dataclasses.replace(span, step=step))
    recorder.close()

    def places(steps: range | None) -> dict[int, int]:
        events = read_traces([tmp_path / "t.jsonl"], steps=steps)[0].events
        return {event.step: event.t for event in events if isinstance(event, CounterEvent)}

    every = places(None)
    assert every == {0: 2000, 1: 3000, 2: 4000, 3: 5000}
    for step in range(4):
        assert places(range(step, step + 1)) == {step: every[step]}


def test_a_device_that_has_failed_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: TraceEvents) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    before = len(os.listdir("/proc/self/fd"))
    model, path = Stack(layers=3), tmp_path / "trace.jsonl"
    with memo.offload(model, alpha=1.0, min_bytes="1KiB", disk=tmp_path, trace=path) as manager:
        model(torch.randint(0, 61, (1, 64))).backward()
    monkeypatch.setattr(TraceEvents, "finish", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        manager.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert json.loads(path.read_text().splitlines()[-1])["k"] == "end"
