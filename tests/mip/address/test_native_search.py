"""The compiled loops: against their Python reference, against the checker, and against the clock."""

from __future__ import annotations

import time
from array import array

import pytest
from address_problems import random_problem, smallest_arena

from benchmarks.pack import generated
from memo.mip.address import DEVICE, AddressPlan, AddressProblem, Buffer, check, plan_to_json, portfolio, solve
from memo.mip.address.instance import Instance, make_instance
from memo.mip.address.native_search import Compiled, Pure, SearchAnswer, Weights, make_engine
from memo.mip.address.portfolio import ArenaSolver
from memo.mip.address.problem import ArenaPlan, Status

FAR = 1e12
WEIGHTS = Weights(by_size=0.5, by_width=0.5)


def instance_of(problem: AddressProblem) -> Instance:
    return make_instance(problem.buffers, alignment=problem.alignment)


def compiled(instance: Instance) -> Compiled:
    engine = make_engine(instance)
    assert isinstance(engine, Compiled), "the tests need a C++ compiler"
    return engine


def placed(problem: AddressProblem, instance: Instance, offsets: tuple[int, ...]) -> AddressPlan:
    """The plan of a placement in units, for the checker."""
    height = instance.height(offsets) * instance.unit
    arena = ArenaPlan(name=DEVICE, nbytes=height, lower_bound_nbytes=0, status=Status.FEASIBLE, method="")
    return AddressPlan(problem=problem, offsets=tuple(at * instance.unit for at in offsets), arenas=(arena,))


def crowded(n: int) -> AddressProblem:
    """Buffers of sixty sizes in twenty instants: many live at once, and many have equal offsets."""
    return AddressProblem(
        buffers=tuple(
            Buffer(id=str(i), start=i * 7 % 20, end=i * 7 % 20 + 1 + i * i % 9, nbytes=1 + i * 31 % 60)
            for i in range(n)
        )
    )


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_a_sweep_is_valid_and_the_same_in_both_engines(seed: int) -> None:
    problem = random_problem(seed, n=30)
    instance = instance_of(problem)
    offsets = compiled(instance).sweep()
    assert check(placed(problem, instance, offsets)) is None
    assert instance.height(offsets) == instance.height(Pure(instance).sweep())


@pytest.mark.parametrize("n", [63, 64, 65, 700])
def test_fits_of_crowds_are_valid_and_the_same_in_both_engines(n: int) -> None:
    problem = crowded(n)
    instance = instance_of(problem)
    engine, pure = compiled(instance), Pure(instance)
    for order in (range(n), range(n - 1, -1, -1)):
        for best in (False, True):
            offsets = engine.fit(order, best=best, deadline=FAR)
            assert offsets is not None
            assert check(placed(problem, instance, offsets)) is None
            assert offsets == pure.fit(order, best=best, deadline=FAR)


def test_refill_reaches_nearly_every_height_that_exists_and_none_that_does_not() -> None:
    reached = 0
    for seed in range(60):
        problem = random_problem(seed, n=6)
        instance = instance_of(problem)
        best = smallest_arena(problem) // instance.unit
        engine = compiled(instance)
        start = engine.sweep()
        assert engine.refill(start, target=best - 1, steps=300, seed=seed, weights=WEIGHTS, deadline=FAR) is None
        found = engine.refill(start, target=best, steps=3000, seed=seed, weights=WEIGHTS, deadline=FAR)
        if found is not None:
            reached += 1
            assert instance.height(found) == best
            assert check(placed(problem, instance, found)) is None
    assert reached >= 57


def test_refill_places_what_was_not_placed() -> None:
    problem = crowded(200)
    instance = instance_of(problem)
    engine = compiled(instance)
    start = list(engine.sweep())
    start[3], start[10:90] = -1, [-1] * 80
    target = instance.lower_bound + instance.lower_bound // 5
    found = engine.refill(start, target=target, steps=10_000, seed=0, weights=WEIGHTS, deadline=FAR)
    assert found is not None
    assert instance.height(found) <= target
    assert check(placed(problem, instance, found)) is None


def test_equal_seeds_refill_equally_and_others_do_not() -> None:
    instance = instance_of(crowded(400))
    engine = compiled(instance)
    target = instance.lower_bound + instance.lower_bound // 20

    def refilled(seed: int) -> tuple[int, ...] | None:
        start = engine.sweep()
        return engine.refill(start, target=target, steps=20_000, seed=seed, weights=WEIGHTS, deadline=FAR)

    assert refilled(5) is not None
    assert refilled(5) == refilled(5)
    assert refilled(5) != refilled(6)


@pytest.mark.parametrize("call", ["fit", "refill", "search"])
def test_every_loop_asks_the_clock(call: str) -> None:
    """In processor time, which other processes do not lengthen: each of these takes a second and more to its end."""
    problem = crowded(12_000)
    instance = instance_of(problem)
    engine = compiled(instance)
    order = list(range(instance.n))
    conflicts = array("q", bytes(8 * instance.n_sections))
    start = engine.sweep()
    began, deadline = time.process_time(), time.monotonic() + 0.05
    if call == "fit":
        assert engine.fit(order, best=True, deadline=deadline) is None
    elif call == "refill":
        target = instance.lower_bound
        unplaced = [-1] * instance.n
        for given in (start, unplaced):
            assert engine.refill(given, target=target, steps=10**9, seed=0, weights=WEIGHTS, deadline=deadline) is None
    else:
        limits = {"capacity": instance.lower_bound, "node_limit": 10**9}
        outcome = engine.search(order, **limits, deadline=deadline, conflicts=conflicts)
        assert outcome.answer is SearchAnswer.STOPPED
    assert time.process_time() - began < 0.5


def test_an_arena_without_a_capacity_always_has_a_plan() -> None:
    plan = solve(crowded(3000), time_limit_s=0)
    assert check(plan) is None
    assert plan.arena(DEVICE).method == "first fit by start"


def test_the_time_limit_leaves_time_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparation takes 0.4 s of the 1 s, so the check is expected to; the searches have what is left."""

    def slowly(*given: object, **options: object) -> Instance:
        time.sleep(0.4)
        return make_instance(*given, **options)

    began = time.monotonic()
    at_check = []
    monkeypatch.setattr("memo.mip.address.solver.make_instance", slowly)
    monkeypatch.setattr("memo.mip.address.solver.require_valid", lambda _: at_check.append(time.monotonic() - began))
    monkeypatch.setattr(ArenaSolver, "done", lambda _, *, deadline, gap: time.monotonic() >= deadline)
    solve(crowded(300), time_limit_s=1)
    assert 0.5 < at_check[0] < 0.8


def test_numbers_too_large_for_the_compiled_loops_are_left_to_python() -> None:
    huge = (1 << 60) + 1
    problem = AddressProblem(buffers=tuple(Buffer(id=str(i), start=0, end=1, nbytes=huge - 2 * i) for i in range(3)))
    assert isinstance(make_engine(instance_of(problem)), Pure)
    plan = solve(problem, time_limit_s=1)
    assert check(plan) is None
    assert plan.arena(DEVICE).nbytes == 3 * huge - 6


def test_the_core_is_solved_first_and_the_rest_goes_around_it() -> None:
    """A trace whose bound no greedy order meets, at once by its core."""
    problem = generated("irregular-600")
    greedy = ArenaSolver(instance_of(problem))
    greedy.portfolio(deadline=FAR)
    assert not greedy.optimal
    plan = solve(problem, time_limit_s=60)
    assert plan.arena(DEVICE).method == "core first"
    assert plan.status is Status.OPTIMAL
    assert plan_to_json(solve(problem, time_limit_s=60)) == plan_to_json(plan)


def test_local_search_alone_meets_a_bound_that_no_order_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = instance_of(generated("irregular-6000"))
    monkeypatch.setattr(portfolio, "TREE_MEETINGS", 0)
    solver = ArenaSolver(instance, core_loads=())
    solver.portfolio(deadline=FAR)
    before = solver.upper or 0
    assert before > instance.lower_bound * 1.005
    solver.search(deadline=FAR, turns=12)
    assert solver.method == "local search"
    assert (solver.upper or 0) <= instance.lower_bound * 1.005


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_meetings_peaks_and_parts_are_those_of_the_definition(seed: int) -> None:
    instance = instance_of(random_problem(seed, n=30))
    spans = instance.spans
    meet = [(i, k) for i, a in enumerate(spans) for k, b in enumerate(spans) if i != k and a[0] < b[1] and b[0] < a[1]]
    assert instance.n_meetings == len(meet)
    sections = [range(*span) for span in spans]
    assert instance.peaks == tuple(max(instance.loads[s] for s in inside) for inside in sections)
    chosen = list(range(0, instance.n, 2))
    part = instance.part(chosen)
    assert part.sizes == tuple(instance.sizes[i] for i in chosen)
    inside = [set(range(*span)) for span in part.spans]
    for a, i in enumerate(chosen):
        for b, k in enumerate(chosen):
            assert bool(inside[a] & inside[b]) == bool(set(sections[i]) & set(sections[k]))
