"""A simulated step as a trace: the real reader takes it, and every figure of the statistics is that of the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_steps import layer, rates, step

from memo.events import Event, Lane, TierName
from memo.mip.simulate import StageSimulation, stage_events
from memo.mip.simulate.result import LayerWork
from memo.trace import StepStats, TraceRecorder, device_stack
from memo.trace.reader import read_trace
from memo.trace.stats import rank_stats
from memo.trace.tensor_lifetimes import lifetimes_of

LAYERS = [
    layer(number, kept=300, host=900, disk=600, recomputed=400, recompute_s=0.5, transient=(70, 90))
    for number in range(4)
]
LINKS = rates(d2h=1000, h2d=800, write=500, read=500)


def stage_of(layers: list[LayerWork]) -> StageSimulation:
    return step(layers, LINKS)


def figures(tmp_path: Path, stage: StageSimulation) -> StepStats:
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path)
    for event in stage_events(stage, end_s=stage.end_s):
        recorder.emit(event)
    recorder.close()
    trace = read_trace(path)
    assert not trace.remarks
    return rank_stats(trace).steps[0]


def test_times_bytes_and_stalls_are_those_of_the_simulation(tmp_path: Path) -> None:
    stage = stage_of(LAYERS)
    found = figures(tmp_path, stage)
    assert found.complete
    assert found.duration_ns == pytest.approx(stage.end_s * 1e9, abs=1)
    assert found.recompute_ns == pytest.approx(stage.recompute_s * 1e9, abs=10)
    assert found.stall_ns == pytest.approx(stage.stall_s * 1e9, abs=10)
    assert found.stall_ns > 0
    assert found.compute_ns == pytest.approx((stage.compute_s + stage.recompute_s) * 1e9, abs=10)
    for lane in found.lanes:
        assert lane.nbytes == stage.moved_nbytes(lane.lane) > 0
    assert {one.cause: one.total_ns for one in found.stalls} == {
        cause: pytest.approx(sum(wait.seconds for wait in stage.waits if wait.cause is cause) * 1e9, abs=10)
        for cause in {wait.cause for wait in stage.waits}
    }


def test_replayed_states_hold_what_the_tiers_held(tmp_path: Path) -> None:
    """In the lower tiers to the byte; on the device all but what no storage is: static bytes and transients."""
    bare = [layer(number, kept=300, host=900, disk=600, recomputed=400) for number in range(4)]
    stage = stage_of(bare)
    peaks = {peak.tier: peak for peak in figures(tmp_path, stage).peaks}
    for tier in TierName:
        assert peaks[tier].saved_nbytes == stage.peak(tier).nbytes
        assert peaks[tier].measured_nbytes == stage.peak(tier).nbytes


def test_the_device_is_stacked_to_its_peak(tmp_path: Path) -> None:
    """Static bytes, what is saved and transients add up to what the simulation held, at every instant."""
    stage = step(LAYERS, LINKS, static_nbytes=5000)
    events = sorted(stage_events(stage, end_s=stage.end_s), key=lambda event: event.t)
    memory = device_stack(events, lifetimes_of(events))
    assert sum(memory.at(memory.peak()).values()) == stage.peak(TierName.DEVICE).nbytes
    last = {round(one.t_s * 1e9): one.nbytes for one in stage.occupancies if one.tier is TierName.DEVICE}
    for t, nbytes in last.items():
        held = memory.at(t)
        assert sum(held.values()) == nbytes
        assert held["weights, gradients, optimizer"] == 5000


def test_every_use_says_how_the_bytes_were_found(tmp_path: Path) -> None:
    prefetch = figures(tmp_path, stage_of(LAYERS)).prefetch
    assert (prefetch.prefetched, prefetch.fetched, prefetch.live) == (2 * 3, 0, 4 + 2)  # kept, and the last layer's


def test_each_part_of_a_call_is_one_storage_and_what_is_recomputed_lives_twice() -> None:
    events: list[Event] = list(stage_events(stage_of(LAYERS), end_s=100))
    lives = lifetimes_of(events)
    names = [life.module for life in lives if life.module.startswith("layers.0.")]
    assert sorted(names) == [f"layers.0.{part}" for part in ("disk", "host", "kept", "recomputed", "recomputed")]
    disk = next(life for life in lives if life.module == "layers.0.disk")
    assert disk.tier is TierName.DISK
    assert {span.lane for span in disk.moves} == {Lane.D2H, Lane.DISK_WRITE, Lane.DISK_READ, Lane.H2D}
    assert events[0].t == 0
    assert events[-1].t == 100_000_000_000
