"""Steps of the GPT, recorded without a GPU, planned, and replayed by the compiled arena."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from standin_runtime import Call, Driver, open_standin

from memo.allocator import AllocationTrace
from memo.allocator.native import Native
from memo.allocator.planned_allocator import AllocatorStage, PlannedAllocator
from memo.gpt import preset
from memo.record import gpt_step, record_step

WAYS = {
    "plain": {},
    "checkpointed": {"checkpointed": True},
    "offloaded": {"alpha": 0.5},
    "with optimizer": {"optimizer": "adamw"},
}


@pytest.fixture
def native() -> Iterator[Native]:
    for native, _ in open_standin():
        yield native


def calls_of(trace: AllocationTrace) -> list[Call]:
    return [Call(block=a.id, nbytes=None if freed else a.size) for a, freed in trace.events()]


@functools.cache
def trace_of(way: str, layers: int) -> AllocationTrace:
    config = preset("125m", layers=layers, max_seq=8192)
    return record_step(functools.partial(gpt_step, config, batch=1, tokens=8192), **WAYS[way]).trace  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [4, 12, pytest.param(32, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_step_replays_at_its_lower_bound_without_a_fallback(native: Native, way: str, layers: int) -> None:
    calls = calls_of(trace_of(way, layers))
    allocator = PlannedAllocator(native, plan_seconds=600.0)
    driver = Driver(native)
    for number in range(5):
        if number == 3:
            allocator.wait()
        with allocator.step():
            driver.run(calls)
        driver.free_all()
    assert allocator.stage() is AllocatorStage.REPLAY
    assert allocator.last is not None
    assert (allocator.last.fallbacks, allocator.last.first) == (0, None)
    assert allocator.last.planned + allocator.last.outside == allocator.last.requests > 10 * layers
    layout = allocator.layout()
    assert layout is not None
    assert layout.nbytes <= 1.01 * layout.lower_bound_nbytes
    allocator.close()


def test_long_and_short_steps_and_evaluation_share_one_arena(native: Native) -> None:
    steps = {"long": calls_of(trace_of("plain", 12)), "short": calls_of(trace_of("plain", 4))}
    steps["eval"] = steps["short"][: len(steps["short"]) // 2]
    allocator = PlannedAllocator(native, plan_seconds=20.0)
    driver = Driver(native)
    for number in range(6):
        if number == 2:
            allocator.wait()
        for signature, calls in steps.items():
            with allocator.step(signature):
                driver.run(calls)
            driver.free_all()
            if number > 2:
                assert allocator.last is not None
                assert (allocator.last.fallbacks, allocator.last.first) == (0, None)
    assert native.counters(0).arena_mallocs <= 3
    allocator.close()
