"""The rules beside the solver: plans that the checker accepts, and none of them shorter than the solver's."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.solver.__main__ import is_deciding, summary
from benchmarks.solver.problems import Named, problems, with_budget
from benchmarks.solver.rules import RULES, best_of, greedy, lp
from memo.mip.activation.checker import check_plan
from memo.mip.activation.plan import LayerPlan
from memo.mip.simulate.simulator import simulate

SOME = (0, 6, 9, 11)
"""Of the thirty: a host for a third, a host that binds, a fast link, a slow one."""


@pytest.fixture(scope="module")
def some() -> list[Named]:
    return [named for number, named in enumerate(itertools.islice(problems(), max(SOME) + 1)) if number in SOME]


def test_every_rules_plan_is_valid_and_no_shorter_than_the_solvers(some: list[Named]) -> None:
    for named in some:
        best = lp(named.problem)
        assert best is not None
        for rule, choose in RULES.items():
            found = choose(named.problem)
            if found is None:
                assert rule in ("uniform alpha", "SSDTrain", "all swap")
                continue
            assert check_plan(found.plan) is None
            assert not simulate(found.plan).overflows
            assert found.step_s >= best.step_s * (1 - 2e-3), (named.name, rule)


def test_a_rule_that_fills_more_than_the_device_is_no_candidate(some: list[Named]) -> None:
    problem = some[0].problem
    keep = [LayerPlan()] * len(problem.profile.layers)
    assert best_of(problem, iter([keep])) is None
    assert best_of(with_budget(problem, 1 << 46), iter([keep])) is not None


def test_the_greedy_rule_gives_up_nothing_where_everything_fits(some: list[Named]) -> None:
    found = greedy(with_budget(some[0].problem, 1 << 46))
    assert found is not None
    assert all(not plan.recomputes and plan.kept == 1 for plan in found.plan.layers)


def test_the_summary_counts_what_fits_and_compares_with_the_solver() -> None:
    def row(**given: float) -> dict[str, dict[str, float | None]]:
        return {"step_s": dict.fromkeys(RULES) | given}

    rows = [row(LP=1.0, greedy=1.1), row(LP=2.0, greedy=2.0), row(LP=1.0)]
    told = summary(rows)
    assert told["greedy"]["fits"] == 2
    assert told["greedy"]["of"] == 3
    assert told["greedy"]["median"] == pytest.approx(1.05)
    assert told["greedy"]["worst"] == pytest.approx(1.1)
    assert told["SSDTrain"]["fits"] == 0
    assert told["SSDTrain"]["median"] is None
    assert told["greedy"]["costs_more_than_1_percent"] == 1


def test_more_room_never_makes_the_greedy_rule_slower(some: list[Named]) -> None:
    problem = some[-1].problem
    least = problem.budgets.device_bytes
    steps = [found.step_s for room in (1.0, 1.1, 1.3) if (found := greedy(with_budget(problem, round(least * room))))]
    assert len(steps) == 3
    assert steps == pytest.approx(sorted(steps, reverse=True), rel=5e-3)


def test_a_problem_decides_where_a_rule_that_moves_bytes_is_slower_or_has_no_plan() -> None:
    same = {"step_s": dict.fromkeys(RULES, 1.0)}
    assert not is_deciding(same)
    assert is_deciding({"step_s": same["step_s"] | {"greedy": 1.01}})
    assert is_deciding({"step_s": same["step_s"] | {"SSDTrain": None}})
    assert not is_deciding({"step_s": same["step_s"] | {"all recompute": 2.0}})
