"""Watch, record, plan in the background, replay: whole runs of steps on a stand-in runtime."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from standin_runtime import Call, Driver, Standin, open_standin

from memo.allocator import plan_in_background, planned_allocator
from memo.allocator.native import Native
from memo.allocator.plan_from_events import AllocationRequest, layout_of, merge, problem_of, recording_of
from memo.allocator.plan_in_background import Planning
from memo.allocator.planned_allocator import AllocatorStage, PlannedAllocator
from memo.allocator.step import EventKind, Reason, StepEvent
from memo.errors import AllocatorError, SolverFailed
from memo.mip.address import AddressProblem, Buffer, check

KIB = 1024
SIDE = 0x77


@pytest.fixture
def machine() -> Iterator[tuple[Native, Standin]]:
    yield from open_standin()


@pytest.fixture
def driver(machine: tuple[Native, Standin]) -> Driver:
    return Driver(machine[0])


@pytest.fixture
def allocator(machine: tuple[Native, Standin]) -> Iterator[PlannedAllocator]:
    allocator = PlannedAllocator(machine[0], plan_seconds=5.0)
    yield allocator
    allocator.close()


def layers(count: int, nbytes: int, *, late: int = 0) -> list[Call]:
    """Forward and backward: each layer saves a block; backward frees them in reverse, `late` of them one layer late.

    A layer's gradients need what the layers behind it have freed, wherever a plan has placed them.
    """
    calls = []
    for n in range(count):
        calls += [
            Call(block=f"saved{n}", nbytes=nbytes),
            Call(block=f"work{n}", nbytes=3 * nbytes),
            Call(block=f"work{n}"),
        ]
    for n in reversed(range(count)):
        calls.append(Call(block=f"grad{n}", nbytes=(2 + count - n) * nbytes))
        freed = [Call(block=f"saved{n}")]
        if n < late:
            freed = []
        calls += [*freed, Call(block=f"grad{n}")]
    return [*calls, *(Call(block=f"saved{n}") for n in range(late))]


STEP = layers(6, 8 * KIB)


def run(allocator: PlannedAllocator, driver: Driver, calls: Sequence[Call], *, signature: str = "step") -> None:
    with allocator.step(signature):
        driver.run(calls)


def trained(allocator: PlannedAllocator, driver: Driver, calls: Sequence[Call], *, signature: str = "step") -> None:
    """Steps until the plan is in use."""
    for _ in range(2):
        run(allocator, driver, calls, signature=signature)
        driver.free_all()
    allocator.wait()


def test_the_first_steps_warm_up_are_recorded_and_planned_and_then_replayed(
    allocator: PlannedAllocator, driver: Driver
) -> None:
    stages = [allocator.stage()]
    for number in range(5):
        if number == 3:
            allocator.wait()
        run(allocator, driver, STEP)
        stages.append(allocator.stage())
    assert stages == [
        AllocatorStage.WARM_UP,
        AllocatorStage.RECORD,
        AllocatorStage.PLANNING,
        AllocatorStage.PLANNING,
        AllocatorStage.REPLAY,
        AllocatorStage.REPLAY,
    ]
    assert allocator.last is not None
    assert (allocator.last.planned, allocator.last.fallbacks) == (len(STEP) // 2, 0)
    layout = allocator.layout()
    assert layout is not None
    assert layout.nbytes == layout.lower_bound_nbytes


def test_after_planning_a_step_takes_nothing_from_the_device(
    machine: tuple[Native, Standin], allocator: PlannedAllocator, driver: Driver
) -> None:
    _, standin = machine
    trained(allocator, driver, STEP)
    run(allocator, driver, STEP)
    calls = {name: standin.calls(name) for name in ("cudaMalloc", "cudaMallocAsync", "cudaFree", "cudaFreeAsync")}
    for _ in range(20):
        run(allocator, driver, STEP)
    assert calls == {name: standin.calls(name) for name in calls}


def test_each_signature_has_a_plan_of_its_own_in_one_arena(
    machine: tuple[Native, Standin], allocator: PlannedAllocator, driver: Driver
) -> None:
    native, _ = machine
    kinds = {"train": STEP, "long": layers(6, 16 * KIB), "eval": layers(2, 2 * KIB)}
    for signature, calls in kinds.items():
        trained(allocator, driver, calls, signature=signature)
    for _ in range(3):
        for signature, calls in kinds.items():
            run(allocator, driver, calls, signature=signature)
            assert allocator.last is not None
            assert (allocator.last.planned, allocator.last.first) == (allocator.last.requests, None)
    long = allocator.layout("long")
    assert long is not None
    assert native.counters(0).arena_bytes == long.nbytes


def test_the_least_recently_used_signature_is_forgotten(allocator: PlannedAllocator, driver: Driver) -> None:
    first, second, *others, last = [f"{n}" for n in range(planned_allocator.KEPT_SIGNATURES + 1)]
    for name in (first, second, *others):
        trained(allocator, driver, layers(2, 512), signature=name)
    run(allocator, driver, layers(2, 512), signature=first)
    trained(allocator, driver, layers(2, 512), signature=last)
    assert allocator.stage(second) is AllocatorStage.WARM_UP
    assert all(allocator.stage(name) is AllocatorStage.REPLAY for name in (first, *others, last))


def test_frees_that_come_later_than_known_are_learned(allocator: PlannedAllocator, driver: Driver) -> None:
    trained(allocator, driver, STEP)
    before = allocator.layout()
    late = layers(6, 8 * KIB, late=5)
    with pytest.warns(UserWarning, match="left its plan.*still held"):
        run(allocator, driver, late)
    allocator.wait()
    after = allocator.layout()
    assert before is not None
    assert after is not None
    assert after.offsets != before.offsets
    for calls in (late, STEP):  # the new plan has room for both
        run(allocator, driver, calls)
        assert allocator.last is not None
        assert allocator.last.first is None


def test_another_step_is_planned_anew_when_it_comes_twice(allocator: PlannedAllocator, driver: Driver) -> None:
    trained(allocator, driver, STEP)
    once = layers(6, 12 * KIB)
    with pytest.warns(UserWarning, match="another size"):
        run(allocator, driver, once)
    allocator.wait()
    run(allocator, driver, STEP)
    assert allocator.last is not None
    assert allocator.last.first is None  # it has kept the plan
    run(allocator, driver, once)
    allocator.wait()
    run(allocator, driver, once)
    assert allocator.last.first is None


def test_a_step_that_never_repeats_does_not_plan_without_end(
    allocator: PlannedAllocator, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_allocator, "PLANS_EACH", 2)
    trained(allocator, driver, STEP)
    made = []
    monkeypatch.setattr(planned_allocator, "Planning", lambda *a, **k: made.append(Planning(*a, **k)) or made[-1])
    monkeypatch.setattr(allocator, "_warned", True)
    for late in range(1, 6):
        run(allocator, driver, layers(6, 8 * KIB, late=late))
        allocator.wait()
    assert len(made) == 1


def test_only_the_first_divergence_warns_all_are_counted(
    machine: tuple[Native, Standin], allocator: PlannedAllocator, driver: Driver
) -> None:
    trained(allocator, driver, STEP)
    with pytest.warns(UserWarning, match="request 10: another size"):
        run(allocator, driver, [*STEP[:9], *STEP[12:]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(allocator, driver, [*STEP[:9], *STEP[12:]])
    assert machine[0].counters(0).divergent_steps == 2


def test_a_step_that_fails_teaches_nothing(allocator: PlannedAllocator, driver: Driver) -> None:
    def failing() -> None:
        with allocator.step():
            driver.run(STEP[:5])
            raise ZeroDivisionError

    run(allocator, driver, STEP)
    with pytest.raises(ZeroDivisionError):
        failing()
    assert not allocator.in_step
    driver.free_all()
    assert allocator.stage() is AllocatorStage.RECORD
    run(allocator, driver, STEP)
    allocator.wait()
    run(allocator, driver, STEP)
    assert allocator.last is not None
    assert allocator.last.planned == len(STEP) // 2


def test_steps_do_not_nest(allocator: PlannedAllocator) -> None:
    with allocator.step(), pytest.raises(AllocatorError, match="inside another"):
        allocator.begin_step("other")


def test_without_room_for_the_arena_steps_run_unplanned_and_say_so(
    machine: tuple[Native, Standin], allocator: PlannedAllocator, driver: Driver
) -> None:
    trained(allocator, driver, STEP)
    machine[1].limit(10 * KIB)
    with pytest.warns(UserWarning, match="no room for the arena"):
        allocator.begin_step()
    allocator.end_step()
    machine[1].limit(1 << 40)
    assert allocator.stage() is AllocatorStage.UNPLANNED
    run(allocator, driver, STEP)
    assert allocator.stage() is AllocatorStage.UNPLANNED


def test_a_step_with_nothing_to_plan_is_left_alone(allocator: PlannedAllocator, driver: Driver) -> None:
    for _ in range(3):
        run(allocator, driver, [])
    assert allocator.stage() is AllocatorStage.UNPLANNED


def test_a_planner_that_fails_leaves_the_steps_unplanned(
    allocator: PlannedAllocator, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_in_background.sys, "executable", "/bin/false")
    with pytest.warns(UserWarning, match="background planner"):
        trained(allocator, driver, STEP)
    run(allocator, driver, STEP)
    assert allocator.stage() is AllocatorStage.UNPLANNED


def test_blocks_of_several_streams_never_share_bytes(
    machine: tuple[Native, Standin], allocator: PlannedAllocator, driver: Driver
) -> None:
    """One stream stands still: were its bytes given to the other, the other's kernel would overwrite them."""
    _, standin = machine
    streams = (0, SIDE)

    def step() -> None:
        for n in range(12):
            stream = streams[n % 2]
            at = driver.malloc(f"{n}", 4 * KIB, stream)
            assert at is not None
            standin.write(stream, at, 4 * KIB, n + 1)
            standin.verify(stream, at, 4 * KIB, n + 1)
            driver.free(f"{n}")

    for number in range(4):
        if number == 2:
            allocator.wait()
        with allocator.step():
            standin.stall(SIDE)
            step()
    standin.stall(SIDE, False)
    assert allocator.last is not None
    assert (allocator.last.planned, allocator.last.fallbacks) == (12, 0)


def test_a_block_used_by_another_stream_is_not_reused_before_that_stream_is_done(
    machine: tuple[Native, Standin], allocator: PlannedAllocator, driver: Driver
) -> None:
    _, standin = machine

    def step(*, shared: bool) -> None:
        at = driver.malloc("a", 4 * KIB)
        assert at is not None
        standin.write(0, at, 4 * KIB, 1)
        if shared:
            driver.record_stream("a", SIDE)
            standin.stall(SIDE)
            standin.verify(SIDE, at, 4 * KIB, 1)  # a copy that lags behind
        driver.free("a")
        again = driver.malloc("b", 4 * KIB)
        assert again is not None
        standin.write(0, again, 4 * KIB, 2)
        driver.free("b")

    for _ in range(2):
        with allocator.step():
            step(shared=False)
    allocator.wait()
    with pytest.warns(UserWarning, match="second stream used the block"), allocator.step():
        step(shared=True)
    with allocator.step():  # the other stream still has not come to it
        step(shared=False)
    assert allocator.last is not None
    assert allocator.last.first is not None
    assert allocator.last.first.reason is Reason.TAKEN
    standin.stall(SIDE, False)
    allocator.wait()  # planned anew, with that block outside
    with allocator.step():
        step(shared=True)
    assert (allocator.last.outside, allocator.last.fallbacks) == (1, 0)


def event(kind: EventKind, request: int, nbytes: int = 512, stream: int = 0) -> StepEvent:
    return StepEvent(kind=kind, request=request, nbytes=nbytes, stream=stream, thread=0)


def test_a_recording_counts_time_in_mallocs() -> None:
    recording = recording_of(
        [
            event(EventKind.MALLOC, 0),
            event(EventKind.MALLOC, 1, 1024),
            event(EventKind.FREE, 0),
            event(EventKind.USED_ELSEWHERE, 1, stream=SIDE),
            event(EventKind.MALLOC, 2, stream=SIDE),
            event(EventKind.FREE, 1),
        ]
    )
    assert recording == (
        AllocationRequest(nbytes=512, stream=0, end=2, shared=False),
        AllocationRequest(nbytes=1024, stream=0, end=3, shared=True),
        AllocationRequest(nbytes=512, stream=SIDE, end=None, shared=False),
    )
    assert [buffer.id for buffer in problem_of(recording).buffers] == ["0"]


def test_merging_keeps_the_longest_life_and_refuses_other_requests() -> None:
    def request(end: int | None, nbytes: int = 512, *, shared: bool = False) -> AllocationRequest:
        return AllocationRequest(nbytes=nbytes, stream=0, end=end, shared=shared)

    assert merge((request(1), request(5), request(2)), (request(3), request(None), request(2, shared=True))) == (
        request(3),
        request(None),
        request(2, shared=True),
    )
    assert merge((request(1),), (request(1, 1024),)) is None
    assert merge((request(1),), (request(1), request(2))) is None


def test_a_layout_puts_each_stream_in_a_region_of_its_own() -> None:
    recording = tuple(
        AllocationRequest(nbytes=1024, stream=stream, end=n + 1, shared=False)
        for n, stream in enumerate([0, SIDE, 0, SIDE])
    )
    planning = Planning(problem_of(recording), time_limit_s=5.0)
    layout = layout_of(recording, planning.result())
    assert layout.nbytes == 2048
    assert [layout.offsets[0], layout.offsets[1]] == [layout.offsets[2], layout.offsets[3]]
    assert layout.offsets[0] != layout.offsets[1]


def test_the_background_plan_is_checked_and_says_why_it_failed() -> None:
    problem = AddressProblem(buffers=(Buffer(id="a", start=0, end=1, nbytes=512),), alignment=512)
    planning = Planning(problem, time_limit_s=5.0)
    plan = planning.result()
    assert planning.done()
    assert check(plan) is None
    impossible = AddressProblem(buffers=problem.buffers, alignment=512, capacities={"device": 256})
    with pytest.raises(SolverFailed, match="device"):
        Planning(impossible, time_limit_s=5.0).result()


def test_a_planning_that_is_dropped_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o700)
    monkeypatch.setattr(plan_in_background.sys, "executable", str(slow))
    planning = Planning(AddressProblem(buffers=()), time_limit_s=60.0)
    assert not planning.done()
    process = planning._process
    del planning
    assert process.returncode == -signal.SIGKILL


def test_the_background_planner_imports_no_torch_and_no_second_solver() -> None:
    code = "import sys, memo.allocator.plan_in_background\nassert not {'torch', 'ortools'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
