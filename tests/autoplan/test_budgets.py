"""Plans made while training keep the device's budget: what is left free for the rest, and what comes of a step above it."""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest
import torch
from planning_machine import CURVE, LAYER_BYTES, LAYERS, TOKENS, Machine, make, step, tight

from memo.autoplan import AutoPlan
from memo.autoplan.controller import MAX_CORRECTIONS
from memo.autoplan.limits import MEASURING
from memo.errors import PlanError
from memo.mip.activation import ActivationPlan, ActivationProblem, Pipeline, solve_problem
from memo.swap import Level


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
    assert machine.used == [MEASURING, MEASURING]
    assert machine.growths == [1.0, 2.0]


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


@pytest.mark.promise("P2")
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


def test_after_plans_that_never_hold_the_budget_layers_are_as_in_the_step_that_did() -> None:
    machine = tight(4.5)
    auto = make(machine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3 + 2 * (MAX_CORRECTIONS + 3)):
            step(auto, machine)
            machine.peak = machine.device_bytes + 1 if isinstance(machine.used[-1], ActivationPlan) else 0
    assert machine.used[-1] is MEASURING
    assert auto.plan is None
    assert "took more device memory than the budget" in auto.outcome().lines()[0]
    assert sum("no plan" in str(one.message) for one in told) == 1


def test_microbatches_in_flight_each_keep_what_the_budget_has_room_for() -> None:
    """Two forwards before the first backward: both microbatches' kept bytes are in the predicted peak."""
    machine = tight(9)
    auto = make(machine)
    for number in range(3):
        step(auto, machine)
        if number == 1:
            machine.tell()
    plan = auto.plan
    assert plan is not None
    assert (plan.problem.pipeline.microbatches, plan.problem.pipeline.in_flight(0)) == (2, 2)
    assert plan.problem.budgets.device_bytes == machine.device_bytes
    one = dataclasses.replace(plan.problem, pipeline=Pipeline())
    kept = sum(solve_problem(one).layers[n].kept for n in range(len(LAYERS)))
    assert sum(layer.kept * (layer.point != "attention") for layer in plan.layers) < kept


def test_the_schedule_says_how_many_microbatches_are_in_flight() -> None:
    machine = tight(9)
    auto = AutoPlan(machine, solve_problem, held=2)
    for number in range(3):
        step(auto, machine)
        if number == 1:
            for _ in range(4):
                machine.tell()
    plan = auto.plan
    assert plan is not None
    assert (plan.problem.pipeline.microbatches, plan.problem.pipeline.held) == (5, 2)


@pytest.mark.parametrize(("margin_bytes", "needed"), [(0, "8.321MiB"), (16 << 20, "24.97MiB")])
def test_a_budget_that_nothing_fits_leaves_the_level_that_holds_least_and_says_why(
    margin_bytes: int, needed: str
) -> None:
    machine = Machine(device_bytes=1 << 10)
    machine.margin_bytes = margin_bytes
    machine.others_bytes = 3 << 20  # a user's budget is for all of it
    machine.peak = 1 << 20
    auto = make(machine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(8):
            step(auto, machine)
    said = [str(one.message) for one in told if "more device memory than its budget" not in str(one.message)]
    assert len(said) == 1
    does = "every layer recomputes everything and offloads its input"
    assert re.match(
        f"no plan: it needs device='{needed}' or more: .* takes 5 MiB beside 3 MiB for everything but saved tensors; "
        f"{does}",
        said[0],
    )
    assert machine.used == [MEASURING, Level.SAVE_INPUT]
    assert auto.plan is None
    assert auto.outcome().why_not is not None
    first, second = auto.outcome().lines()
    assert first.startswith("plan: none: ")
    assert re.match(f"{does}: forward and backward .* predicted, of which .* is recompute", second)


def test_what_loading_the_solver_takes_is_left_free() -> None:
    machine = tight(9)
    machine.loaded_bytes = machine.device_bytes // 3
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    assert auto.plan is not None
    assert auto.plan.problem.budgets.device_bytes == machine.device_bytes - machine.loaded_bytes


def test_room_that_no_step_had_shown_to_be_free_is_used_once_a_plan_has_run_where_it_shortens_a_step() -> None:
    machine = tight(4.5)
    machine.host_bytes, machine.loaded_bytes = 0, machine.device_bytes // 2
    auto, plans = make(machine), []
    for _ in range(10):
        step(auto, machine)
        plans.append(auto.plan)
    first, last = plans[3], plans[-1]
    assert first is not None
    assert last is not None
    assert first.problem.budgets.device_bytes == machine.device_bytes - machine.loaded_bytes
    assert last.problem.budgets.device_bytes == machine.device_bytes
    assert last.step_s < 0.95 * first.step_s
    assert plans[5:] == [last] * 5
    assert auto.outcome().phase == "settled"


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


def test_where_no_plan_fits_layers_stay_as_in_the_measured_step_if_that_kept_the_budget() -> None:
    machine = tight(0.3)
    auto = make(machine)
    for _ in range(2):
        step(auto, machine)
    with pytest.warns(
        RuntimeWarning, match="no plan: .*; every layer recomputes everything but attention and offloads"
    ):
        step(auto, machine)
    for _ in range(3):
        step(auto, machine)
    assert machine.used == [MEASURING]
    outcome = auto.outcome()
    assert (outcome.phase, outcome.plan) == ("settled", None)
    seconds = {point: seconds for point, _, seconds in CURVE}
    assert outcome.fallback is not None
    assert outcome.fallback.recompute_s == pytest.approx(len(LAYERS) * seconds["attention"])
    assert outcome.lines()[1].startswith("every layer recomputes everything but attention and offloads the rest: ")


@pytest.mark.filterwarnings("ignore:a step of .* more device memory than its budget:RuntimeWarning")
def test_layers_save_their_inputs_alone_where_the_measured_step_had_no_room() -> None:
    machine = tight(9)
    auto = make(machine)
    step(auto, machine)
    machine.peak = machine.device_bytes + 1
    step(auto, machine)
    step(auto, machine)
    assert machine.used == [MEASURING, Level.SAVE_INPUT]
    assert auto.outcome().phase == "warm up"
    machine.peak = 0
    for _ in range(2):
        step(auto, machine)
    assert isinstance(machine.used[-1], ActivationPlan)


@pytest.mark.filterwarnings(
    "ignore:a step of .* more device memory than its budget:RuntimeWarning", "ignore:no plan:RuntimeWarning"
)
@pytest.mark.parametrize("tokens", [TOKENS, 2 * TOKENS])
def test_a_level_that_exceeded_the_budget_is_not_used_again(tokens: int) -> None:
    machine = tight(4.5)
    auto = make(machine)
    length = TOKENS
    for _ in range(40):
        step(auto, machine, tokens=length)
        machine.peak = 0 if machine.used[-1] is Level.SAVE_INPUT else machine.device_bytes + 1
        if auto.plan is not None:
            length = tokens
    assert machine.used.count(MEASURING) == 1
    assert machine.used[-1] is Level.SAVE_INPUT
    assert auto.outcome().phase == "settled"
    assert auto.outcome().lines()[1].startswith("every layer recomputes everything and offloads its input")


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


def test_a_plan_whose_storages_need_more_than_the_host_has_is_made_again_with_less() -> None:
    """The solver counts bytes; at addresses, in one piece each, they may need more."""
    machine = tight(2.5)
    machine.host_bytes = 3 * machine.full_bytes
    machine.addresses = 1.25
    auto = make(machine)
    for _ in range(3):
        step(auto, machine)
    plan = auto.plan
    assert plan is not None
    assert machine.host_excess(plan) == 0
    alone = dataclasses.replace(plan.problem.budgets, host_bytes=machine.host_bytes)
    most = solve_problem(dataclasses.replace(plan.problem, budgets=alone))
    excess = machine.host_excess(most)
    assert 0 < excess == machine.host_bytes - plan.problem.budgets.host_bytes
    assert machine.used == [MEASURING, plan], "the first one was never in use"


def test_host_memory_is_prepared_once_after_the_warm_up() -> None:
    machine = tight()
    auto = make(machine)
    phases = []
    for _ in range(6):
        before = len(machine.prepared_after)
        step(auto, machine)
        if len(machine.prepared_after) > before:
            phases.append(auto.outcome().phase)
    assert phases == ["profiling"]


@pytest.mark.parametrize("late_layers", [0.0, 1.5])
def test_the_disk_is_left_where_the_room_of_what_is_late_costs_more(late_layers: float) -> None:
    machine = tight()
    room, machine.host_bytes = machine.device_bytes, 2 * LAYER_BYTES
    machine.disk_bytes, machine.late = 1 << 40, round(late_layers * LAYER_BYTES)
    auto = make(machine)
    for _ in range(3):
        step(auto, machine)
    plan = auto.plan
    assert plan is not None
    assert any(part.disk for part in plan.layers) == (late_layers == 0)
    assert plan.problem.budgets.device_bytes == room
    without = dataclasses.replace(plan.problem.budgets, device_bytes=room - machine.late, disk_bytes=1 << 40)
    assert plan.step_s <= solve_problem(dataclasses.replace(plan.problem, budgets=without)).step_s


def test_the_link_is_measured_once_before_host_memory_is_page_locked() -> None:
    machine = tight()
    auto = make(machine)
    for tokens in (TOKENS, TOKENS, TOKENS, 2 * TOKENS, 2 * TOKENS, 2 * TOKENS):
        step(auto, machine, tokens=tokens)
    assert machine.links_measured_after == [0]
