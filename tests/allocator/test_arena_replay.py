"""Steps replayed from the arena, on a stand-in runtime: recorded traces, and each way in which a step can leave its plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from standin_runtime import Call, Driver, Standin, open_standin

from memo.allocator import trace_of
from memo.allocator.native import Begun, Native
from memo.allocator.plan_from_events import layout_of, problem_of, recording_of
from memo.allocator.step import EventKind, Reason, StepSummary
from memo.errors import AllocatorError
from memo.mip.address import Method, read_problem, require_valid, solve

DATA = Path(__file__).parent.parent / "mip" / "data"
KIB = 1024
SIDE = 0x77

STEP = (
    Call(block="a", nbytes=8 * KIB),
    Call(block="b", nbytes=4 * KIB),
    Call(block="a"),
    Call(block="c", nbytes=2 * KIB),
    Call(block="b"),
    Call(block="d", nbytes=16 * KIB),
    Call(block="c"),
    Call(block="e", nbytes=1 * KIB),
    Call(block="d"),
    Call(block="e"),
)


@pytest.fixture
def machine() -> Iterator[tuple[Native, Standin]]:
    yield from open_standin()


@pytest.fixture
def native(machine: tuple[Native, Standin]) -> Native:
    return machine[0]


@pytest.fixture
def standin(machine: tuple[Native, Standin]) -> Standin:
    return machine[1]


@pytest.fixture
def driver(native: Native) -> Driver:
    return Driver(native)


def step(native: Native, driver: Driver, calls: tuple[Call, ...], plan: int | None = None) -> StepSummary:
    native.begin_step(0, plan)
    driver.run(calls)
    return native.end_step()


def plan_for(native: Native, driver: Driver, calls: tuple[Call, ...] = STEP) -> int:
    """Records the calls as a step, plans it, and hands the plan over."""
    step(native, driver, calls)
    recording = recording_of(native.events())
    plan = solve(problem_of(recording), method=Method.SEARCH)
    require_valid(plan)
    layout = layout_of(recording, plan)
    return native.add_plan(
        [request.nbytes for request in recording],
        layout.offsets,
        [request.stream for request in recording],
        arena_nbytes=layout.nbytes,
    )


def calls_of(path: Path) -> tuple[Call, ...]:
    return tuple(
        Call(block=allocation.id) if freed else Call(block=allocation.id, nbytes=allocation.size)
        for allocation, freed in trace_of(read_problem(path)).events()
    )


def test_a_step_is_written_down_call_by_call(native: Native, driver: Driver) -> None:
    summary = step(native, driver, STEP)
    events = native.events()
    assert [(event.kind, event.request) for event in events[:4]] == [
        (EventKind.MALLOC, 0),
        (EventKind.MALLOC, 1),
        (EventKind.FREE, 0),
        (EventKind.MALLOC, 2),
    ]
    assert [event.nbytes for event in events if event.kind is EventKind.MALLOC] == [8192, 4096, 2048, 16384, 1024]
    assert (summary.requests, summary.planned, summary.fallbacks) == (5, 0, 0)


@pytest.mark.parametrize("name", ["gptm_L4_ckpt", "lvl1-B_ckpt_L12", "rnd_n32_s0"])
def test_recorded_traces_replay_without_a_fallback(native: Native, standin: Standin, driver: Driver, name: str) -> None:
    trace = trace_of(read_problem(DATA / f"{name}.csv"))
    calls = calls_of(DATA / f"{name}.csv")
    plan = plan_for(native, driver, calls)
    driver.free_all()  # what outlives the trace
    pool_before = native.counters(0).pool_mallocs
    for _ in range(3):
        summary = step(native, driver, calls, plan)
        assert summary.first is None
        assert (summary.fallbacks, summary.planned + summary.outside) == (0, summary.requests)
        outliving = sum(allocation.upper == trace.end for allocation in trace.allocations)
        assert summary.outside <= outliving
        driver.free_all()
    counters = native.counters(0)
    assert standin.calls("cudaMalloc") == counters.arena_mallocs == 1
    assert counters.pool_mallocs - pool_before == counters.outside


def test_places_are_the_planned_ones_in_every_step(native: Native, driver: Driver) -> None:
    plan = plan_for(native, driver)
    seen = []
    for _ in range(2):
        native.begin_step(0, plan)
        seen.append([driver.malloc("a", 8 * KIB), driver.malloc("b", 4 * KIB)])
        driver.free_all()
        native.end_step()
    assert seen[0] == seen[1]


def replaced(position: int, call: Call) -> tuple[Call, ...]:
    return (*STEP[:position], call, *STEP[position + 1 :])


DIVERGENCES = {
    "other size": (replaced(3, Call(block="c", nbytes=3 * KIB)), Reason.OTHER_SIZE, 2),
    "other stream": (replaced(3, Call(block="c", nbytes=2 * KIB, stream=SIDE)), Reason.OTHER_STREAM, 2),
    "other order": ((STEP[1], STEP[0], *STEP[2:]), Reason.OTHER_SIZE, 0),
    "extra": ((*STEP[:3], Call(block="x", nbytes=7 * KIB), Call(block="x"), *STEP[3:]), Reason.OTHER_SIZE, 2),
    "extra at the end": ((*STEP, Call(block="x", nbytes=512), Call(block="x")), Reason.EXTRA, 5),
    "missing": (tuple(call for call in STEP if call.block != "c"), Reason.OTHER_SIZE, 2),
    "missing at the end": (tuple(call for call in STEP if call.block != "e"), Reason.MISSING, 4),
    "free too late": (tuple(call for call in STEP if call.block != "a" or call.nbytes), Reason.TAKEN, 3),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_step_that_leaves_its_plan_is_named_and_the_next_one_follows_it(
    native: Native, driver: Driver, name: str
) -> None:
    calls, reason, request = DIVERGENCES[name]
    plan = plan_for(native, driver)
    summary = step(native, driver, calls, plan)
    assert summary.divergences > 0
    assert summary.first is not None
    assert (summary.first.reason, summary.first.request) == (reason, request)
    assert summary.planned + summary.outside + summary.fallbacks == summary.requests
    driver.free_all()
    assert step(native, driver, STEP, plan).first is None
    counters = native.counters(0)
    assert (counters.divergent_steps, counters.fallbacks) == (1, summary.fallbacks)


def test_the_divergence_says_what_was_planned_and_what_came(native: Native, driver: Driver) -> None:
    plan = plan_for(native, driver)
    first = step(native, driver, DIVERGENCES["other size"][0], plan).first
    assert first is not None
    assert (first.slot, first.expected_nbytes, first.got_nbytes) == (2, 2 * KIB, 3 * KIB)
    assert "request 2" in str(first)
    assert "2 KiB" in str(first)
    assert "3 KiB" in str(first)


def test_one_odd_request_costs_two_fallbacks_not_the_rest_of_the_step(native: Native, driver: Driver) -> None:
    sizes = [512 * (3 + number * 7 % 31) for number in range(200)]
    calls = tuple(
        call for n, size in enumerate(sizes) for call in (Call(block=f"{n}", nbytes=size), Call(block=f"{n}"))
    )
    plan = plan_for(native, driver, calls)
    odd = (*calls[:100], Call(block="x", nbytes=99 * 512), *calls[102:])
    summary = step(native, driver, odd, plan)
    driver.free_all()
    assert 1 <= summary.fallbacks <= 3
    assert summary.planned >= summary.requests - 3
    left_out = step(native, driver, calls[:100] + calls[104:], plan)
    assert left_out.planned >= left_out.requests - 3


def test_a_second_free_is_counted_and_harmless(native: Native, driver: Driver) -> None:
    plan = plan_for(native, driver)
    native.begin_step(0, plan)
    at = driver.malloc("a", 8 * KIB)
    assert at is not None
    driver.free("a")
    driver.free_address(at)
    driver.free_address(0x1234)
    summary = native.end_step()
    assert summary.first is not None
    assert summary.first.reason is Reason.UNKNOWN_FREE
    assert native.counters(0).unknown_frees == 2
    assert step(native, driver, STEP, plan).first is None


def test_a_block_kept_past_its_step_is_never_given_to_another(native: Native, driver: Driver) -> None:
    plan = plan_for(native, driver)
    kept = tuple(call for call in STEP if call.block != "d" or call.nbytes)
    assert step(native, driver, kept, plan).first is None  # nothing met it
    driver.live["kept"] = driver.live.pop("d")
    summary = step(native, driver, STEP, plan)  # the driver asserts that nothing lies where it lies
    assert summary.first is not None
    assert summary.first.reason is Reason.TAKEN
    driver.free_all()
    assert step(native, driver, STEP, plan).first is None


def test_what_outlives_the_step_is_planned_outside(native: Native, driver: Driver) -> None:
    calls = (*STEP[:-2], STEP[-1])  # d stays
    plan = plan_for(native, driver, calls)
    driver.free_all()
    summary = step(native, driver, calls, plan)
    assert (summary.outside, summary.fallbacks, summary.first) == (1, 0, None)
    driver.free_all()


def test_empty_requests_have_addresses_of_their_own(native: Native, driver: Driver) -> None:
    calls = tuple(Call(block=f"{n}", nbytes=0) for n in range(4))
    calls += tuple(Call(block=f"{n}") for n in range(4))
    plan = plan_for(native, driver, calls)
    native.begin_step(0, plan)
    addresses = {driver.malloc(f"{n}", 0) for n in range(4)}
    assert len(addresses) == 4
    assert None not in addresses
    driver.free_all()
    assert native.end_step().first is None


def test_a_request_that_no_machine_can_serve_is_refused(native: Native, standin: Standin, driver: Driver) -> None:
    standin.limit(1 << 20)
    assert driver.malloc("huge", (1 << 64) - 1) is None
    assert driver.malloc("large", 2 << 20) is None
    assert native.counters(0).out_of_memory == 1  # the first is not even asked for
    assert driver.malloc("small", 1 << 19) is not None
    driver.free_all()


def test_a_full_device_serves_from_what_the_arena_does_not_need(
    native: Native, standin: Standin, driver: Driver
) -> None:
    plan = plan_for(native, driver)
    step(native, driver, STEP, plan)
    standin.limit(native.counters(0).reserved_bytes)  # the arena and nothing else
    first = driver.malloc("x", 10 * KIB)
    assert first is not None
    assert driver.malloc("y", 10 * KIB) is None  # 18 KiB of arena hold one of them
    assert native.counters(0).rescues == 1
    standin.limit(1 << 40)
    summary = step(native, driver, STEP, plan)  # beside the rescued block
    assert summary.first is not None
    assert summary.first.reason is Reason.TAKEN
    driver.free_all()
    assert step(native, driver, STEP, plan).first is None


def test_an_arena_that_must_grow_waits_until_it_is_empty(native: Native, driver: Driver) -> None:
    small = plan_for(native, driver)
    large = plan_for(native, driver, tuple(Call(block=c.block, nbytes=c.nbytes and c.nbytes * 4) for c in STEP))
    kept = tuple(call for call in STEP if call.block != "d" or call.nbytes)
    step(native, driver, kept, small)
    assert native.begin_step(0, large) is Begun.BUSY
    native.end_step()
    driver.free_all()
    assert native.begin_step(0, large) is Begun.REPLAYING
    native.end_step()
    assert native.counters(0).arena_mallocs == 2
    assert native.begin_step(0, small) is Begun.REPLAYING  # the larger one serves both
    native.end_step()
    assert native.counters(0).arena_mallocs == 2


def test_without_room_for_the_arena_steps_go_on(native: Native, standin: Standin, driver: Driver) -> None:
    plan = plan_for(native, driver)
    standin.limit(17 * KIB)
    assert native.begin_step(0, plan) is Begun.NO_ROOM
    assert driver.malloc("a", 8 * KIB) is not None
    driver.free_all()
    native.end_step()


def test_a_forgotten_plan_serves_its_step_to_the_end(native: Native, driver: Driver) -> None:
    plan = plan_for(native, driver)
    native.begin_step(0, plan)
    native.forget_plan(plan)
    driver.run(STEP)
    assert native.end_step().first is None
    assert native.begin_step(0, plan) is Begun.WATCHING
    native.end_step()


def test_steps_do_not_nest(native: Native) -> None:
    native.begin_step(0, None)
    with pytest.raises(AllocatorError, match="inside another"):
        native.begin_step(0, None)
    native.end_step()
    with pytest.raises(AllocatorError, match="never began"):
        native.end_step()


BAD_PLANS = {
    "size": ([100], [0], [0], 512),
    "empty": ([0], [0], [0], 512),
    "offset": ([512], [100], [0], 4096),
    "outside": ([1024], [0], [0], 512),
    "far outside": ([512], [1 << 62], [0], 4096),
    "streams": ([1024, 512], [0, 512], [0, SIDE], 4096),
    "negative": ([512], [0], [0], -1),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_breaks_a_rule_is_refused(native: Native, name: str) -> None:
    sizes, offsets, streams, nbytes = BAD_PLANS[name]
    with pytest.raises(AllocatorError, match="refuses"):
        native.add_plan(sizes, offsets, streams, arena_nbytes=nbytes)


def test_a_plan_that_overlaps_itself_gives_no_address_twice(native: Native, driver: Driver) -> None:
    plan = native.add_plan([1024, 1024, 1024], [0, 512, 1024], [0, 0, 0], arena_nbytes=2048)
    calls = tuple(Call(block=name, nbytes=1024) for name in "abc")
    summary = step(native, driver, calls, plan)
    assert (summary.planned, summary.fallbacks) == (2, 1)
    assert summary.first is not None
    assert summary.first.reason is Reason.TAKEN
    driver.free_all()


def test_frees_on_another_thread_are_part_of_the_step(native: Native, driver: Driver) -> None:
    def freed_elsewhere(plan: int | None) -> StepSummary:
        native.begin_step(0, plan)
        for call in STEP:
            if call.nbytes is not None:
                driver.malloc(call.block, call.nbytes)
            else:
                thread = threading.Thread(target=driver.free, args=(call.block,))
                thread.start()
                thread.join()
        return native.end_step()

    freed_elsewhere(None)
    assert len({event.thread for event in native.events()}) > 1
    plan = plan_for(native, driver)
    assert freed_elsewhere(plan).first is None


def test_other_devices_are_not_part_of_the_step(native: Native, driver: Driver) -> None:
    plan = plan_for(native, driver)
    native.begin_step(0, plan)
    driver.malloc("elsewhere", 4 * KIB, device=1)
    driver.run(STEP)
    assert native.end_step().first is None
    driver.free_all()


def test_a_device_without_pools_is_served_by_plain_malloc() -> None:
    for native, standin in open_standin(pools=False):
        driver = Driver(native)
        plan = plan_for(native, driver)
        before = standin.calls("cudaMalloc")
        assert step(native, driver, STEP, plan).first is None
        assert standin.calls("cudaMalloc") == before + 1  # the arena
        assert standin.calls("cudaMallocAsync") == 0


def test_counters_are_exact(native: Native, standin: Standin, driver: Driver) -> None:
    driver.malloc("x", 1000)
    assert native.counters(0).allocated_bytes == 1024
    plan = plan_for(native, driver)
    step(native, driver, STEP, plan)
    counters = native.counters(0)
    assert (counters.allocated_bytes, counters.peak_allocated_bytes) == (1024, 1024 + 18 * KIB)
    assert (counters.arena_bytes, counters.arena_used_bytes, counters.peak_arena_used_bytes) == (18 * KIB, 0, 18 * KIB)
    assert counters.reserved_bytes == standin.held == 18 * KIB + 1024  # the pool was emptied for the arena
    native.reset_peaks()
    assert native.counters(0).peak_allocated_bytes == 1024
    driver.free_all()
    assert native.counters(0).allocated_bytes == 0


def test_device_bytes_are_the_arena_and_the_blocks_outside_it_and_their_peak_is_never_restarted(
    native: Native, driver: Driver
) -> None:
    driver.malloc("x", 1000)
    assert native.counters(0).device_bytes == native.counters(0).peak_device_bytes == 1024
    plan = plan_for(native, driver)
    step(native, driver, STEP, plan)
    assert native.counters(0).device_bytes == 18 * KIB + 1024  # the step's blocks are freed; the arena stays
    driver.malloc("y", 4 * KIB)
    driver.free("y")
    native.reset_peaks()
    counters = native.counters(0)
    assert (counters.allocated_bytes, counters.peak_allocated_bytes) == (1024, 1024)
    assert (counters.device_bytes, counters.peak_device_bytes) == (18 * KIB + 1024, 22 * KIB + 1024)
    driver.free_all()


def test_memory_is_not_taken_back_while_blocks_are_in_use(native: Native, driver: Driver) -> None:
    driver.malloc("x", 512)
    assert native.close() == 1
    driver.free_all()


def test_a_library_that_is_no_runtime_is_refused(native: Native, tmp_path: Path) -> None:
    with pytest.raises(AllocatorError, match="cannot be used"):
        native.open(tmp_path / "nothing.so")
    with pytest.raises(AllocatorError, match="has no cuda"):
        native.open("libm.so.6")
