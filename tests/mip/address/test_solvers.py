"""Every solver against exhaustive search and against the checker."""

from __future__ import annotations

import dataclasses
import re
import time
from array import array
from pathlib import Path

import pytest
from address_problems import random_problem, smallest_arena
from hypothesis import given, settings, strategies as st
from tree_search import TreeSearch

from memo.errors import Infeasible, PlanInvalid, SolverFailed, SolverTimeout
from memo.mip import solvers
from memo.mip.address import (
    DEVICE,
    AddressPlan,
    AddressProblem,
    Buffer,
    Method,
    check,
    plan_to_json,
    read_problem,
    solve,
)
from memo.mip.address.bilevel import solve_by_layers
from memo.mip.address.buffer_orders import portfolio_orders
from memo.mip.address.instance import make_instance
from memo.mip.address.lower_bound import peak
from memo.mip.address.milp import overlapping_pairs
from memo.mip.address.native_search import Compiled, SearchAnswer, SearchEngine, make_engine
from memo.mip.address.portfolio import ArenaSolver, luby
from memo.mip.address.problem import Status

DATA = Path(__file__).parents[1] / "data"
FAR = 1e12


def buffer(name: str, start: int, end: int, nbytes: int, **rest: object) -> Buffer:
    return Buffer(id=name, start=start, end=end, nbytes=nbytes, **rest)


def engines(problem: AddressProblem) -> list[SearchEngine]:
    instance = make_instance(problem.buffers, alignment=problem.alignment)
    compiled = make_engine(instance)
    assert isinstance(compiled, Compiled), "the tests need a C++ compiler"
    # Parts of any size go both ways through tree.h: floors anew at each node, and kept from node to node.
    return [compiled, Compiled(instance, compiled._library, small_part=0), TreeSearch(instance)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_the_arena_is_the_smallest_there_is(seed: int) -> None:
    problem = random_problem(seed, n=5)
    plan = solve(problem)
    assert check(plan) is None
    assert plan.arena(DEVICE).nbytes == smallest_arena(problem)
    assert plan.status is Status.OPTIMAL


@pytest.mark.parametrize("seed", [3, 5, 12, 20, 60, 77])
def test_the_arena_is_the_smallest_for_seven_buffers(seed: int) -> None:
    problem = random_problem(seed, n=7)
    assert solve(problem).arena(DEVICE).nbytes == smallest_arena(problem)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_all_engines_decide_every_capacity_as_exhaustive_search_does(seed: int) -> None:
    problem = random_problem(seed, n=5)
    instance = make_instance(problem.buffers, alignment=problem.alignment)
    best = smallest_arena(problem) // instance.unit
    order = list(range(instance.n))
    for engine in engines(problem):
        for capacity, answer in (
            (best - 1, SearchAnswer.IMPOSSIBLE),
            (best, SearchAnswer.FOUND),
            (best + 3, SearchAnswer.FOUND),
        ):
            conflicts = array("q", bytes(8 * instance.n_sections))
            outcome = engine.search(order, capacity=capacity, node_limit=10**6, deadline=FAR, conflicts=conflicts)
            assert outcome.answer is answer
            if answer is SearchAnswer.FOUND:
                assert instance.height(outcome.offsets) <= capacity
                spans = [range(at, at + size) for at, size in zip(outcome.offsets, instance.sizes, strict=True)]
                assert not any(set(spans[i]) & set(spans[j]) for i, j in overlapping_pairs(instance))


@pytest.mark.parametrize("seed", range(0, 60, 5))
def test_both_engines_fit_alike(seed: int) -> None:
    problem = random_problem(seed, n=30)
    instance = make_instance(problem.buffers, alignment=problem.alignment)
    compiled, _, pure = engines(problem)
    for _, order in portfolio_orders(instance):
        for best in (False, True):
            first = compiled.fit(order, best=best, deadline=FAR)
            assert first is not None
            assert instance.height(first) == instance.height(pure.fit(order, best=best, deadline=FAR) or ())


@pytest.mark.parametrize("name", ["A.1048576", "E.1048576"])
def test_hard_instances_are_solved_at_their_capacity(name: str) -> None:
    problem = dataclasses.replace(read_problem(DATA / f"{name}.csv"), capacities={DEVICE: 1048576})
    plan = solve(problem, time_limit_s=60)
    assert plan.arena(DEVICE).nbytes == 1048576


def test_c_is_solved_at_its_lower_bound() -> None:
    assert solve(read_problem(DATA / "C.1048576.csv")).arena(DEVICE).nbytes == 1_039_360


@pytest.mark.parametrize("name", ["gptm_L4_ckpt", "lvl1-B_ckpt_L12", "rnd_n32_s0"])
def test_recorded_steps_meet_the_lower_bound(name: str) -> None:
    plan = solve(read_problem(DATA / f"{name}.csv"))
    assert plan.arena(DEVICE).nbytes == plan.arena(DEVICE).lower_bound_nbytes == peak(plan.problem.buffers)[1]


def test_the_python_engine_solves_a_recorded_step_alone() -> None:
    problem = read_problem(DATA / "rnd_n32_s0.csv")
    instance = make_instance(problem.buffers, alignment=1)
    solver = ArenaSolver(instance, engine=TreeSearch(instance))
    solver.run(deadline=time.monotonic() + 60)
    assert solver.upper == instance.lower_bound


def test_equal_problems_give_equal_bytes() -> None:
    problem = read_problem(DATA / "rnd_n32_s0.csv")
    assert plan_to_json(solve(problem, seed=3)) == plan_to_json(solve(problem, seed=3))


@pytest.mark.parametrize("seed", [1, 3, 4, 5, 8, 11])
def test_models_find_the_smallest_arena(seed: int) -> None:
    problem = random_problem(seed, n=6)
    plan = solve(problem, method=Method.MIP, time_limit_s=30)
    assert plan.arena(DEVICE).nbytes == smallest_arena(problem)


def missed_by_the_portfolio() -> AddressProblem:
    """Buffers that no order of the portfolio packs into the bound."""
    for seed in range(1, 400, 2):
        problem = random_problem(seed, n=7)
        instance = make_instance(problem.buffers, alignment=problem.alignment)
        solver = ArenaSolver(instance)
        solver.portfolio(deadline=FAR)
        if not solver.optimal:
            return problem
    raise AssertionError("the portfolio solves everything")


def test_a_warm_start_reaches_highs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "highs.log"

    class Logged(solvers._WarmHiGHS):
        def callSolver(self, lp: object) -> None:
            lp.solverModel.setOptionValue("output_flag", True)
            lp.solverModel.setOptionValue("log_to_console", False)
            lp.solverModel.setOptionValue("log_file", str(log))
            super().callSolver(lp)

    monkeypatch.setattr(solvers, "_WarmHiGHS", Logged)
    solve(missed_by_the_portfolio(), method=Method.MIP)
    judged = log.read_text().partition("Assessing feasibility of MIP")[2]
    for kind in ("Col     infeasibilities", "Integer infeasibilities", "Row     infeasibilities"):
        assert re.search(rf"{kind}\s+0\s", judged), "HiGHS was given no start, or one that is not feasible"


def test_a_crashing_solver_is_a_failure_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> None:
        raise OSError("killed by signal 9")

    monkeypatch.setattr(solvers.pulp.LpProblem, "solve", crash)
    with pytest.raises(SolverFailed, match="killed by signal 9"):
        solve(missed_by_the_portfolio(), method=Method.MIP)


def test_what_a_lying_solver_says_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lie(model: object, *_: object, **__: object) -> solvers.Solved:
        for variable in model.variables():
            variable.varValue = 0.0
        return solvers.Solved(found=True, proven=True)

    monkeypatch.setattr("memo.mip.address.milp.solve_model", lie)
    problem = missed_by_the_portfolio()
    plan = solve(problem, method=Method.MIP)
    assert check(plan) is None
    assert plan.arena(DEVICE).lower_bound_nbytes <= smallest_arena(problem)


def test_a_wrong_placement_never_leaves_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArenaSolver, "portfolio", lambda self, **_: self.offer((0,) * self.instance.n, "wrong"))
    with pytest.raises(PlanInvalid, match="rule bound"):
        solve(AddressProblem(buffers=(buffer("a", 0, 2, 4), buffer("b", 1, 3, 4))))


def test_too_small_a_capacity_is_proven_and_names_the_instant_and_the_bytes() -> None:
    problem = AddressProblem(buffers=(buffer("a", 0, 5, 100), buffer("b", 3, 9, 60)), capacities={DEVICE: 150})
    with pytest.raises(Infeasible, match=r"at instant 3 the live buffers need 160 B, 10 B more .* at least 160 B"):
        solve(problem)
    large = AddressProblem(buffers=(buffer("a", 0, 5, 3 << 30),), capacities={DEVICE: 1 << 30})
    with pytest.raises(Infeasible, match="2 GiB more than its capacity of 1 GiB; it takes at least 3 GiB"):
        solve(large)


def test_a_capacity_between_bound_and_optimum_is_proven_by_search() -> None:
    seed = next(s for s in range(1, 400, 2) if _has_a_gap(random_problem(s, n=6)))
    problem = random_problem(seed, n=6)
    best = smallest_arena(problem)
    with pytest.raises(Infeasible, match="no placement is within"):
        solve(dataclasses.replace(problem, capacities={DEVICE: best - problem.alignment}))
    assert solve(dataclasses.replace(problem, capacities={DEVICE: best})).arena(DEVICE).nbytes == best


def _has_a_gap(problem: AddressProblem) -> bool:
    return smallest_arena(problem) > peak(problem.buffers, alignment=problem.alignment)[1]


def test_no_plan_in_time_is_said_so() -> None:
    problem = dataclasses.replace(read_problem(DATA / "A.1048576.csv"), capacities={DEVICE: 1048576})
    with pytest.raises(SolverTimeout, match="in time"):
        solve(problem, time_limit_s=0.001)


def test_ctrl_c_keeps_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ArenaSolver, "search", press)
    plan = solve(read_problem(DATA / "A.1048576.csv"))
    assert plan.status is Status.FEASIBLE
    assert check(plan) is None


def test_every_arena_is_planned_by_itself() -> None:
    buffers = (buffer("a", 0, 5, 64), buffer("b", 0, 5, 32, arena="host slab"), buffer("c", 5, 9, 64))
    plan: AddressPlan = solve(AddressProblem(buffers=buffers, alignment=64))
    assert {arena.name: arena.nbytes for arena in plan.arenas} == {DEVICE: 64, "host slab": 64}


def test_identical_layers_are_solved_once_and_the_better_level_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    original = ArenaSolver.portfolio
    monkeypatch.setattr(ArenaSolver, "portfolio", lambda s, **k: (solved.append(s.instance.n), original(s, **k)))
    buffers = []
    for layer in range(6):
        t = layer * 10
        group = f"layers.{layer}.forward"
        buffers += [buffer(f"{layer}.{i}", t + i, t + i + 3, 16 + 8 * i, group=group) for i in range(5)]
        buffers.append(buffer(f"{layer}.saved", t + 4, 200 - t, 64))
    step = ArenaSolver(make_instance(buffers, alignment=1))
    solve_by_layers(step, buffers, alignment=1, deadline=time.monotonic() + 60)
    assert solved.count(5) == 1, "one level-1 problem for six identical layers"
    assert solved.count(12) == 1, "level 2: six pseudo-buffers and six saved ones"
    layered = step.upper
    step.portfolio(deadline=FAR)
    assert layered is not None
    assert peak(buffers)[1] == step.instance.unit * (step.upper or 0) <= step.instance.unit * layered


def test_no_buffers_need_no_arena() -> None:
    assert solve(AddressProblem(buffers=())).arenas == ()
    plan = solve(AddressProblem(buffers=(buffer("empty", 0, 1, 0),)))
    assert plan.arena(DEVICE).nbytes == 0
    assert check(plan) is None


def test_huge_byte_counts_are_exact() -> None:
    big = (1 << 50) + 1
    plan = solve(AddressProblem(buffers=(buffer("a", 0, 2, big), buffer("b", 1, 3, big), buffer("c", 2, 4, big))))
    assert plan.arena(DEVICE).nbytes == 2 * big


def test_luby_sequence() -> None:
    assert [luby(turn) for turn in range(1, 16)] == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]


def test_the_layers_are_tried_after_the_portfolio_and_never_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(17, n=40)
    named = dataclasses.replace(
        problem, buffers=tuple(dataclasses.replace(one, group=f"g{i % 4}") for i, one in enumerate(problem.buffers))
    )
    known: list[int | None] = []
    monkeypatch.setattr(
        "memo.mip.address.bilevel.solve_by_layers", lambda solver, buffers, **_: known.append(solver.upper)
    )
    plan = solve(named, time_limit_s=2)
    first = make_instance([one for one in named.buffers if one.nbytes], alignment=named.alignment)
    greedy = ArenaSolver(first)
    greedy.portfolio(deadline=FAR)
    assert not greedy.optimal
    assert known == [greedy.upper]
    assert plan.arena(DEVICE).nbytes <= (greedy.upper or 0) * first.unit


def test_pairs_are_counted_no_further_than_asked() -> None:
    crowd = [buffer(str(i), 0, 10, 512) for i in range(300)]
    instance = make_instance(crowd, alignment=512)
    assert len(overlapping_pairs(instance)) == 300 * 299 // 2
    assert 100 < len(overlapping_pairs(instance, most=100)) <= 100 + 299


def test_a_placement_that_is_known_is_followed_and_never_undercut_by_luck() -> None:
    """On an instance where the portfolio alone stays above the bound, found before by a search."""
    problem = dataclasses.replace(read_problem(DATA / "A.1048576.csv"), capacities={DEVICE: 1048576})
    found = solve(problem)
    offsets = {buffer.id: at for buffer, at in zip(problem.buffers, found.offsets, strict=True)}
    assert not found.arena(DEVICE).method.startswith(("first fit", "best fit"))
    # Somebody else's addresses: scattered over ranges of their own, but in the same order.
    scattered = {name: 3 * at + (1 << 40) for name, at in offsets.items()}
    plan = solve(problem, known={"nobody's": {}, "another's placement": scattered})
    assert plan.arena(DEVICE).method == "first fit by another's placement"
    assert plan.arena(DEVICE).nbytes <= found.arena(DEVICE).nbytes
