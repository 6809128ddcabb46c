"""Plans made while training keep the device's budget: what is left free for the rest, and what comes of a step above it."""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest
import torch
from planning_machine import (
    LAYERS,
    MIXED,
    TOKENS,
    Machine,
    make,
    step,
    tight,
)

from memo.autoplan.actuator_protocol import MEASURING, SAFEST
from memo.autoplan.controller import MAX_CORRECTIONS, AutoPlan
from memo.errors import PlanError
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, Pipeline
from memo.mip.activation.solver import solve_problem


def test_the_plan_of_a_longer_step_leaves_room_for_what_else_grows() -> None:
    machine = tight(9)
    auto = make(machine)
    for _ in range(6):
        machine.transient_bytes = machine.device_bytes // 10
        step(auto, machine)
    step(auto, machine, tokens=2 * TOKENS)
    plan = auto.plan
    assert plan is not None
    assert plan.problem.budgets.device_bytes == machine.device_bytes - 2 * machine.transient_bytes
    assert machine.growths[-1] == 2.0


def test_a_longer_step_before_there_is_a_plan_is_bounded_anew() -> None:
    machine = tight()
    auto = make(machine)
    step(auto, machine)
    step(auto, machine, tokens=2 * TOKENS)
    step(auto, machine, tokens=4 * TOKENS)
    assert machine.used == [MEASURING, MIXED, MIXED, MIXED]
    assert machine.growths == [1.0, 1.0, 2.0, 2.0]


def test_a_step_above_the_budget_is_told_and_planned_anew_though_all_was_settled() -> None:
    machine = tight(4.5)
    auto = make(machine)
    for _ in range(6):
        step(auto, machine)
    first = auto.plan
    assert first is not None
    assert auto.outcome().phase == "settled"
    step(auto, machine, tokens=60)
    assert auto.plan is first
    machine.transient_bytes = taken = machine.device_bytes // 4
    with pytest.warns(RuntimeWarning, match=r"a step of 2 x 60 tokens took .* more device memory than its budget"):
        step(auto, machine)
    second = auto.plan
    assert second is not None
    assert second.stages[0].peak_device_bytes <= machine.device_bytes - taken
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(4):
            step(auto, machine)
    assert auto.outcome().phase == "settled"


@pytest.mark.filterwarnings("ignore:a step of .* more device memory than its budget:RuntimeWarning")
def test_a_peak_above_the_budget_makes_the_next_plan_keep_less() -> None:
    machine = tight(4.5)
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    first = auto.plan
    assert first is not None
    step(auto, machine)
    machine.peak = first.stages[0].peak_device_bytes + (excess := 100_000)  # fractions were kept as whole storages
    for _ in range(4):
        auto.before_forward()
        auto.before_layer((torch.zeros(2, TOKENS, 8),), {})
        machine.tell()
        machine.peak = min(machine.peak, first.stages[0].peak_device_bytes)
    second = auto.plan
    assert second is not None
    assert second.stages[0].peak_device_bytes <= first.stages[0].peak_device_bytes - excess


def test_a_plan_that_does_nothing_is_looked_at_once_too() -> None:
    machine = tight(20)
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    assert auto.plan is not None
    assert auto.plan.declined is not None
    machine.transient_bytes = machine.device_bytes * 3 // 4  # which the steps that were measured did not need
    with pytest.warns(RuntimeWarning, match="more device memory than its budget"):
        step(auto, machine)
    assert auto.plan is not None
    assert auto.plan.declined is None
    assert auto.plan.stages[0].peak_device_bytes <= machine.device_bytes // 4


def test_plans_that_never_hold_the_budget_give_way_to_the_safest_setting() -> None:
    machine = tight(4.5)
    auto = make(machine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3 + 2 * (MAX_CORRECTIONS + 3)):
            step(auto, machine)
            if isinstance(machine.used[-1], ActivationPlan):
                machine.peak = machine.device_bytes + 1
    assert machine.used[-1] is SAFEST
    assert auto.plan is None
    assert "took more device memory than the budget" in auto.outcome().lines()[0]
    assert sum("no plan" in str(one.message) for one in told) == 1


def test_microbatches_in_flight_each_keep_what_the_budget_has_room_for() -> None:
    """Two forwards before the first backward: both microbatches' kept bytes are in the predicted peak."""
    machine = tight(9)
    auto = make(machine)
    for number in range(4):
        step(auto, machine)
        if number == 2:
            machine.tell()
    plan = auto.plan
    assert plan is not None
    assert (plan.problem.pipeline.microbatches, plan.problem.pipeline.in_flight(0)) == (2, 2)
    assert plan.problem.budgets.device_bytes == machine.device_bytes
    one = dataclasses.replace(plan.problem, pipeline=Pipeline())
    kept = sum(solve_problem(one).layers[n].kept for n in range(len(LAYERS)))
    assert sum(layer.kept * (1 - layer.fraction("attention")) for layer in plan.layers) < kept


def test_the_schedule_says_how_many_microbatches_are_in_flight() -> None:
    machine = tight(9)
    auto = AutoPlan(machine, solve_problem, held=2)
    for number in range(4):
        step(auto, machine)
        if number == 2:
            for _ in range(4):
                machine.tell()
    plan = auto.plan
    assert plan is not None
    assert (plan.problem.pipeline.microbatches, plan.problem.pipeline.held) == (5, 2)


def test_a_budget_that_nothing_fits_leaves_the_safest_setting_and_says_why() -> None:
    machine = Machine(device_bytes=1 << 10)
    machine.others_bytes = 3 << 20  # a user's budget is for all of it
    machine.peak = 1 << 20
    auto = make(machine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            step(auto, machine)
        assert auto.plan is not None, "the first setting is tried as a plan before it is given up"
        step(auto, machine)
    said = [str(one.message) for one in told if "more device memory than its budget" not in str(one.message)]
    assert len(said) == 1
    assert re.match("no plan: .*, beside 3 MiB for everything but saved tensors; every layer recomputes", said[0])
    assert machine.used[-1] is SAFEST
    assert auto.plan is None
    assert auto.outcome().why_not is not None
    assert auto.outcome().lines()[0].startswith("plan: none: ")


def test_what_loading_the_solver_takes_is_left_free() -> None:
    machine = tight(9)
    machine.loaded_bytes = machine.device_bytes // 3
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    assert auto.plan is not None
    assert auto.plan.problem.budgets.device_bytes == machine.device_bytes - machine.loaded_bytes


def test_a_settled_step_above_the_budget_is_planned_anew_at_the_same_length() -> None:
    machine = tight(4.5)
    auto = make(machine)
    for _ in range(8):
        step(auto, machine)
    first = auto.plan
    assert first is not None
    assert auto.outcome().phase == "settled"
    machine.transient_bytes = taken = machine.device_bytes // 4
    with pytest.warns(RuntimeWarning, match="more device memory than its budget"):
        step(auto, machine)
    second = auto.plan
    assert second is not None
    assert second.stages[0].peak_device_bytes <= machine.device_bytes - taken
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(4):
            step(auto, machine)
    assert auto.outcome().phase == "settled"


def test_an_excess_that_no_measurement_explains_is_left_free_all_the_same() -> None:
    """Memory beside saved tensors that was there for a moment: neither `limits` nor the saved peak shows it."""
    machine = tight(4.5)
    auto = make(machine)
    for _ in range(8):
        step(auto, machine)
    first = auto.plan
    assert first is not None
    excess = machine.unexplained_bytes = machine.device_bytes // 5
    with pytest.warns(RuntimeWarning, match="more device memory than its budget"):
        step(auto, machine)
    spare = machine.device_bytes - first.stages[0].peak_device_bytes
    assert auto.plan is not None
    assert auto.plan.problem.budgets.device_bytes == machine.device_bytes - (excess - spare)


@pytest.mark.parametrize("settled", [8, 40])
def test_an_excess_that_nothing_helps_against_is_told_again_whenever_it_gets_worse(settled: int) -> None:
    machine = tight(20)
    machine.after_bytes = 0
    auto = make(machine)
    for _ in range(settled):
        step(auto, machine)
    plan = auto.plan
    told = []
    for taken in (10, 10, 10.5, 12, 12, 11, 30):  # by the optimizer's step, which no plan makes less
        machine.after_bytes = int(machine.device_bytes * taken)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(auto, machine)
        told.append(len(caught))
    assert told == [1, 0, 0, 1, 0, 0, 1]
    assert "after its backward" in str(caught[0].message)
    assert auto.plan is plan


@pytest.mark.filterwarnings(
    "ignore:a step of .* more device memory than its budget:RuntimeWarning", "ignore:no plan:RuntimeWarning"
)
def test_where_the_solver_finds_no_room_all_layers_are_alike_if_measured_steps_had_room() -> None:
    machine = tight(1.5)  # the solver counts two whole layers at least
    machine.peak = machine.full_bytes * 4 // 5
    auto = make(machine)
    for _ in range(3):
        step(auto, machine)
    step(auto, machine)
    plan = auto.plan
    assert plan is not None
    assert auto.outcome().why_not is None
    assert re.fullmatch(
        r"device memory: every layer recomputes everything but attention for 25 % of its tokens and offloads the rest: "
        r"forward and backward [\d.]+ m?s predicted, of which [\d.]+ m?s is recompute and [\d.]+ m?s stalls; "
        r"[\d.]+ m?s with everything kept",
        plan.binding[0],
    )
    first = plan.layers[0].fraction("all")
    assert first == 0.75, "of what the measured step left, nine tenths are taken"
    assert {part.fraction("all") for part in plan.layers} == {first, 1.0}, "the last one stays whole"
    alphas = [first]
    while auto.plan is not None:
        machine.peak = machine.device_bytes + 1
        auto.before_forward()
        auto.before_layer((torch.zeros(2, TOKENS, 8),), {})
        if auto.plan is not None:
            alphas.append(auto.plan.layers[0].fraction("all"))
    assert alphas == [0.75, 0.375, 0.125, 0.0]
    assert "no plan fits" in str(auto.outcome().why_not)
    fallback = predict_fallback(plan.problem)
    assert fallback == uniform_plan(plan.problem, 0.0).stages[0], "which says the seconds of what is done instead"


@pytest.mark.filterwarnings("ignore:a step of .* more device memory than its budget:RuntimeWarning")
def test_products_that_had_no_room_in_the_measured_step_are_left_out_of_it() -> None:
    machine = tight(9)
    auto = make(machine)
    step(auto, machine)
    step(auto, machine)
    machine.peak = machine.device_bytes + 1
    step(auto, machine)
    assert machine.used == [MEASURING, MIXED, MEASURING]
    machine.peak = 0
    for _ in range(2):
        step(auto, machine)
    assert isinstance(machine.used[-1], ActivationPlan)


def test_bytes_that_the_host_had_no_room_for_are_left_free_by_the_next_plan() -> None:
    machine = tight(4.5)
    machine.host_bytes = 8 * machine.full_bytes
    auto = make(machine)
    for _ in range(8):
        step(auto, machine)
    first = auto.plan
    assert first is not None
    assert auto.outcome().phase == "settled"
    largest = first.problem.profile.classes[0].largest_storage_bytes
    step(auto, machine)
    machine.lacking = lacking, _ = 3 << 20, 0
    step(auto, machine)
    second = auto.plan
    assert second is not None
    assert second is machine.used[-1] is not first
    assert second.problem.budgets.host_bytes == machine.host_bytes - lacking - largest
    assert second.problem.budgets.device_bytes == first.problem.budgets.device_bytes
    for _ in range(4):
        step(auto, machine)
    assert auto.plan is second
    assert auto.outcome().phase == "settled"


def test_what_had_no_room_before_there_was_a_plan_changes_none() -> None:
    machine = tight(4.5)
    auto = make(machine)
    for _ in range(3):
        machine.lacking = 3 << 20, 3 << 20
        step(auto, machine)
    machine.lacking = 0, 0
    step(auto, machine)
    assert auto.plan is not None
    assert auto.plan.problem.budgets.host_bytes == machine.host_bytes


def test_a_tier_that_lacks_room_step_after_step_is_planned_for_a_few_times() -> None:
    machine = tight(4.5)
    auto = make(machine)
    for _ in range(8):
        step(auto, machine)
    before = len(machine.used)
    for _ in range(3 * MAX_CORRECTIONS):
        machine.lacking = 1 << 20, 0
        step(auto, machine)
    assert len(machine.used) == before + MAX_CORRECTIONS


def test_a_plan_stays_where_none_can_do_with_less_of_the_tier() -> None:
    machine = tight(4.5)
    asked: list[int] = []

    def solve(problem: ActivationProblem) -> ActivationPlan:
        asked.append(problem.budgets.host_bytes)
        if problem.budgets.host_bytes < machine.host_bytes:
            raise PlanError("host memory is full")
        return solve_problem(problem)

    auto = AutoPlan(machine, solve)
    for _ in range(8):
        step(auto, machine)
    first = auto.plan
    asked.clear()
    machine.lacking = 1 << 20, 0
    with pytest.warns(RuntimeWarning, match="the plan stays as it is: host memory is full"):
        step(auto, machine)
    for _ in range(3):
        machine.lacking = 1 << 20, 0
        step(auto, machine)
    assert auto.plan is first is not None
    assert auto.outcome().phase == "settled"
    assert len(asked) == 1


@pytest.mark.filterwarnings("ignore:a step of .* more device memory than its budget:RuntimeWarning")
def test_a_step_above_the_budget_since_a_tier_lacked_room_is_planned_with_less_of_both() -> None:
    machine = tight(4.5)
    auto = make(machine)
    for _ in range(8):
        step(auto, machine)
    machine.lacking = 1 << 20, 0
    machine.transient_bytes = taken = machine.device_bytes // 4
    step(auto, machine)
    step(auto, machine)
    assert auto.plan is not None
    assert auto.plan.problem.budgets.host_bytes < machine.host_bytes
    assert auto.plan.problem.budgets.device_bytes <= machine.device_bytes - taken
