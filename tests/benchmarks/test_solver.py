"""The rules beside the solver: plans that the checker accepts, and none of them shorter than the solver's."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.results import ROOT
from benchmarks.solver import rules
from benchmarks.solver.__main__ import carried_summary, gap_of, is_deciding, summary
from benchmarks.solver.carried import _delay_ns, _medians, _quietest, pairs_in_order
from benchmarks.solver.problems import UNLIKE, Named, problems, with_budget
from benchmarks.solver.rules import RULES, best_of, greedy, lp
from memo.mip.activation import LayerPlan, check_plan, relaxed_step_s
from memo.mip.activation.simulator import simulate

SOME = (0, 6, 9, 11, 19)
"""Of the thirty: a host for a third, a host that binds, a fast link, a slow one, unlike layers."""


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


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_gives_the_same_problem_the_same_plan(some: list[Named], rule: str) -> None:
    first, second = (RULES[rule](some[2].problem) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.plan == second.plan
    assert first.step_s == second.step_s


@pytest.mark.parametrize("rule", RULES)
def test_choosing_plays_no_step(some: list[Named], rule: str) -> None:
    with mock.patch.object(rules, "simulate", wraps=rules.simulate) as played:
        found = RULES[rule](some[2].problem)
        assert found is not None
        assert played.call_count == 0
        assert found.step_s == found.step_s
        assert played.call_count == 1


def test_no_predicted_step_is_below_the_bound(some: list[Named]) -> None:
    for named in (some[1], some[-1]):
        bound_s = relaxed_step_s(named.problem)
        assert bound_s is not None
        for choose in RULES.values():
            found = choose(named.problem)
            assert found is None or found.plan.step_s >= bound_s * (1 - 1e-6)


def test_a_gap_is_the_part_by_which_the_prediction_is_above_the_bound() -> None:
    row = {"bound_s": 2.0, "predicted_s": {"LP": 2.5, "greedy": None}}
    assert gap_of(row, "LP") == pytest.approx(0.25)
    assert gap_of(row, "greedy") is None
    assert gap_of({"bound_s": None, "predicted_s": {"LP": 2.5}}, "LP") is None
    assert gap_of({"step_s": {}}, "LP") is None


def test_layers_of_one_model_are_unlike(some: list[Named]) -> None:
    profile = some[-1].problem.profile
    model, tokens = UNLIKE
    assert some[-1].name.startswith(f"{model} of unlike layers, {tokens >> 10}k")
    wide, narrow, again = profile.layer_profiles()[:3]
    assert again == wide
    assert narrow.full_bytes < wide.full_bytes
    assert narrow.forward_s / narrow.full_bytes > wide.forward_s / wide.full_bytes * 1.1


def test_pairs_are_told_where_predictions_are_apart() -> None:
    predicted = {"LP": 1.0, "greedy": 1.01, "all swap": 2.0, "SSDTrain": 3.0}
    measured = {"LP": 1.1, "greedy": 1.0, "all swap": 3.0, "SSDTrain": 2.0}
    assert pairs_in_order(predicted, measured) == (4, 5)
    assert pairs_in_order({"LP": 1.0}, {"LP": 1.0, "greedy": None}) == (0, 0)


def test_a_rules_step_is_compared_with_the_one_of_the_same_round() -> None:
    told = _medians({"LP": [1.0, 2.0, 4.0], "greedy": [1.5, 3.0, 6.0]})
    assert told["LP"] == 2.0
    assert told["greedy"] == pytest.approx(3.0)
    assert told["SSDTrain"] is None


def test_the_rounds_with_the_least_delay_count_in_their_order() -> None:
    assert _quietest([(0.3, "a"), (0.1, "b"), (0.2, "c"), (0.1, "d")], 2) == [(0.1, "b"), (0.1, "d")]
    assert _quietest([(0.3, "a"), (0.1, "b"), (0.2, "c")], 2) == [(0.1, "b"), (0.2, "c")]
    assert _quietest([(0.0, "a"), (0.0, "b"), (0.0, "c")], 2) == [(0.0, "a"), (0.0, "b")]


def test_waiting_for_a_processor_is_counted_upwards() -> None:
    before = _delay_ns()
    assert 0 <= before <= _delay_ns()


def test_what_was_carried_out_is_summed_up_over_problems() -> None:
    def row(pairs: tuple[int, int], **shares: float) -> dict[str, object]:
        step_s = dict.fromkeys(RULES) | {rule: 2.0 * share for rule, share in shares.items()}
        simulated = dict.fromkeys(shares, 2.0)
        return {"step_s": step_s, "simulated_s": simulated, "measured_over_simulated": shares, "pairs_in_order": pairs}

    told = carried_summary([row((2, 3), LP=1.0, greedy=1.1), row((1, 1), LP=1.2)])
    assert told["pairs_in_order"] == [3, 4]
    assert told["carried_rules"]["LP"]["measured_over_simulated"] == pytest.approx(1.1)
    assert told["carried_rules"]["greedy"]["fits"] == 1
    assert told["carried_rules"]["SSDTrain"]["measured_over_simulated"] is None


def _run(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.solver", *arguments],
        cwd=ROOT,
        env={**os.environ, "OUT": str(out)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_writes_a_row_for_each_problem_with_its_bound(tmp_path: Path) -> None:
    done = _run("--parts", "simulated", "--problems", "1", "--note", "a test", out=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-solver.json")
    assert str(path) in done.stdout
    body = json.loads(path.read_text())
    assert body["note"] == "a test"
    assert len(body["simulated"]) == 1
    for row in body["simulated"]:
        assert set(row["step_s"]) == set(row["predicted_s"]) == set(row["choosing_s"]) == set(RULES)
        assert row["predicted_s"]["LP"] >= row["bound_s"] * (1 - 1e-6)
    assert body["rules"]["LP"]["fits"] == 1
    assert 0 <= body["rules"]["LP"]["worst_gap"] < 0.05


@pytest.mark.parametrize("wrong", [("--problems", "0"), ("--rounds", "0"), ("--parts", "simulatd")])
def test_a_wrong_option_is_refused(tmp_path: Path, wrong: tuple[str, str]) -> None:
    done = _run(*wrong, out=tmp_path)
    assert done.returncode == 2
    assert wrong[0] in done.stderr
    assert not list(tmp_path.iterdir())


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
    assert steps == pytest.approx(sorted(steps, reverse=True), rel=1e-2)


def test_a_problem_decides_where_a_rule_that_moves_bytes_is_slower_or_has_no_plan() -> None:
    same = {"step_s": dict.fromkeys(RULES, 1.0)}
    assert not is_deciding(same)
    assert is_deciding({"step_s": same["step_s"] | {"greedy": 1.01}})
    assert is_deciding({"step_s": same["step_s"] | {"SSDTrain": None}})
    assert not is_deciding({"step_s": same["step_s"] | {"all recompute": 2.0}})
