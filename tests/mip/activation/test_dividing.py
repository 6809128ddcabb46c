"""Layers whose dividing among points takes time: it is counted everywhere, and a plan divides them only where that pays."""

from __future__ import annotations

import dataclasses

import pytest
from activation_problems import layer, machine, profile_of, random_problem

from memo.mip.activation.checker import Rule, check_plan
from memo.mip.activation.cost import predict_stages
from memo.mip.activation.linear_program import Model
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, Budgets, LayerPlan
from memo.mip.activation.rounding import in_storages
from memo.mip.activation.solver import find_plan, relaxed_step_s, solve_problem
from memo.mip.inputs.profile import ALL, ATTENTION, MATMULS
from memo.mip.simulate import simulate, verify_by_simulation

HALF = LayerPlan(points={ALL: 0.5, MATMULS: 0.5}, kept=1.0)
WHOLE = LayerPlan(points={MATMULS: 1.0}, kept=1.0)


def with_divided(problem: ActivationProblem, seconds: float) -> ActivationProblem:
    classes = tuple(dataclasses.replace(known, divided_s=seconds) for known in problem.profile.classes)
    return dataclasses.replace(problem, profile=dataclasses.replace(problem.profile, classes=classes))


def problem_of(
    divided_s: float, *, device: int = 700, host: int = 150, layers: int = 8, **rest: int
) -> ActivationProblem:
    known = layer(divided_s=divided_s, **rest)
    budgets = Budgets(device_bytes=device, host_bytes=host)
    return ActivationProblem(profile=profile_of(*[known] * layers), hardware=machine(), budgets=budgets)


def by_hand(problem: ActivationProblem, *plans: LayerPlan) -> ActivationPlan:
    return ActivationPlan(problem=problem, layers=plans, stages=predict_stages(problem, plans))


def test_each_divided_layer_takes_the_seconds_once_and_one_at_a_single_point_does_not() -> None:
    problem = problem_of(0.25, layers=4, device=1 << 20)
    divided = by_hand(problem, HALF, HALF, WHOLE, LayerPlan())
    free = by_hand(with_divided(problem, 0.0), HALF, HALF, WHOLE, LayerPlan())
    assert divided.step_s == pytest.approx(free.step_s + 2 * 0.25)
    assert simulate(divided).step_s == pytest.approx(simulate(free).step_s + 2 * 0.25)
    for plan in (divided, free):
        assert check_plan(plan) is None
        verify_by_simulation(plan)


def test_a_plan_that_leaves_them_out_is_refused() -> None:
    problem = problem_of(0.25, layers=4, device=1 << 20)
    free = by_hand(with_divided(problem, 0.0), HALF, HALF, WHOLE, LayerPlan())
    violation = check_plan(dataclasses.replace(free, problem=problem))
    assert violation is not None
    assert violation.rule is Rule.PREDICTION


def test_layers_stay_whole_where_dividing_costs_more_than_it_gains() -> None:
    cheap, dear = solve_problem(problem_of(0.0)), solve_problem(problem_of(1.5))
    assert any(len(plan.points) > 1 for plan in cheap.layers)
    assert all(len(plan.points) == 1 for plan in dear.layers)
    assert cheap.step_s < dear.step_s < by_hand(dear.problem, *cheap.layers).step_s


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_longer_than_the_one_that_ignores_dividing(seed: int) -> None:
    problem = with_divided(random_problem(seed, layers=6, classes=2), 0.4)
    ignoring, plan = find_plan(with_divided(problem, 0.0)), find_plan(problem)
    if ignoring is None:
        assert plan is None
        return
    assert plan is not None
    assert plan.step_s <= by_hand(problem, *ignoring.layers).step_s * (1 + 1e-9)
    assert check_plan(plan) is None
    verify_by_simulation(plan)
    bound_s = relaxed_step_s(problem)
    assert bound_s is not None
    assert bound_s <= plan.step_s * (1 + 1e-6)


@pytest.mark.parametrize("divided_s", [0.0, 1.5])
def test_the_same_problem_has_the_same_plan(divided_s: float) -> None:
    assert solve_problem(problem_of(divided_s)) == solve_problem(problem_of(divided_s))


def test_moved_bytes_are_whole_storages_and_the_next_layer_keeps_what_one_could_not() -> None:
    problem = problem_of(0.0, layers=4, storages=8, device=1 << 20)  # of 160 bytes, 20 each
    part = LayerPlan(kept=0.7, host=0.3)  # 112 bytes: five storages, and 12 bytes that the next layer may keep
    rounded = in_storages(problem, [part, part, part, LayerPlan()])
    assert [plan.kept * 160 for plan in rounded] == pytest.approx([100, 120, 100, 160])
    assert [plan.host * 160 for plan in rounded] == pytest.approx([60, 40, 60, 0])
    kept = [sum(plan.kept for plan in rounded[: number + 1]) for number in range(3)]
    assert all(sum_ <= 0.7 * (number + 1) + 1e-9 for number, sum_ in enumerate(kept))


@pytest.mark.parametrize(
    "plan", [LayerPlan(), LayerPlan(kept=0.0, host=1.0), dataclasses.replace(HALF, kept=0.7, host=0.3)]
)
def test_what_is_whole_already_or_divided_by_tokens_is_not_rounded(plan: LayerPlan) -> None:
    problem = problem_of(0.0, layers=4, storages=8, device=1 << 20)
    assert in_storages(problem, [plan, plan, plan, LayerPlan()])[:3] == (plan, plan, plan)


@pytest.mark.parametrize("part", [number / 97 for number in range(1, 97, 7)])
def test_a_tier_that_gets_nothing_gets_nothing_by_rounding(part: float) -> None:
    problem = problem_of(0.0, layers=4, storages=11, device=1 << 20)
    to_host, to_disk = LayerPlan(kept=part, host=1 - part), LayerPlan(kept=part, host=0.0, disk=1 - part)
    for plan in in_storages(problem, [to_host, to_host, to_host, LayerPlan()]):
        assert plan.disk == 0
    for plan in in_storages(problem, [to_disk, to_disk, to_disk, LayerPlan()]):
        assert plan.host == 0


def test_storages_that_are_unknown_are_not_rounded() -> None:
    problem = problem_of(0.0, layers=4, device=1 << 20)
    part = LayerPlan(kept=0.7, host=0.3)
    assert in_storages(problem, [part, part, part, LayerPlan()])[:3] == (part, part, part)


def test_what_moves_is_hidden_storage_by_storage_where_layers_stay_whole() -> None:
    """The link moves 100 bytes in a forward, five storages of 20: with no time to lose, no layer moves six."""
    plan = solve_problem(problem_of(1.5, storages=8, device=640, host=1 << 30))
    assert all(len(part.points) == 1 for part in plan.layers)
    moved = [(part.host + part.disk) * part.saved_bytes(plan.problem.profile.classes[0]) for part in plan.layers]
    assert any(moved)
    assert moved == pytest.approx([round(nbytes / 20) * 20 for nbytes in moved])
    assert max(moved) <= 100 + 1e-6


@pytest.mark.parametrize(("hides", "most"), [(True, 80), (False, 100)])
def test_the_program_moves_no_more_whole_storages_than_a_forward_hides(hides: bool, most: int) -> None:
    """Of six storages of 26.7 bytes three are hidden by a forward in which the link moves 100 bytes."""
    problem = problem_of(0.0, storages=6, device=500, host=1 << 30)
    model = Model(problem, hides_storages=hides)
    assert model.solve()
    known = problem.profile.classes[0]
    assert max(plan.host * plan.saved_bytes(known) for plan in model.layer_plans()) == pytest.approx(most)


def test_the_bound_is_the_step_itself_where_everything_fits() -> None:
    problem = problem_of(0.3, device=1 << 20)
    assert relaxed_step_s(problem) == pytest.approx(solve_problem(problem).step_s)


def test_nothing_bounds_what_has_no_plan() -> None:
    assert relaxed_step_s(problem_of(0.3, device=100)) is None


def test_attention_and_matmuls_mixed_are_divided_too() -> None:
    problem = problem_of(0.25, layers=4, device=1 << 20)
    mixed = LayerPlan(points={MATMULS: 0.5, ATTENTION: 0.5}, kept=1.0)
    free = by_hand(with_divided(problem, 0.0), mixed, WHOLE, WHOLE, LayerPlan())
    assert by_hand(problem, mixed, WHOLE, WHOLE, LayerPlan()).step_s == pytest.approx(free.step_s + 0.25)
