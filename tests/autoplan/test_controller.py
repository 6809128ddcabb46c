"""Plans made, tried, corrected and kept, on a machine that is told how long its layers take."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planning_machine import LAYER_BYTES, TOKENS, Machine, make, step, tight

from memo.autoplan import AutoPlan
from memo.autoplan.controller import MAX_CORRECTIONS
from memo.autoplan.limits import MEASURING
from memo.mip.activation import ActivationPlan


def test_the_plan_comes_after_one_measured_step_and_then_stays() -> None:
    machine = tight()
    auto = make(machine)
    phases = []
    for _ in range(8):
        step(auto, machine)
        phases.append(auto.outcome().phase)
    assert phases == ["warm up", "profiling", "planned", "comparing", *["settled"] * 4]
    setting, plan = machine.used  # a prediction that holds needs no other plan
    assert setting is MEASURING
    assert isinstance(plan, ActivationPlan)
    assert plan.declined is None
    assert plan.problem.profile.mlp_tiles == machine.mlp_tiles, "or the model could not be given it again"
    assert auto.outcome().measured_s == pytest.approx(plan.stages[0].microbatch_s, rel=0.05)
    assert machine.heard_by is None, "a settled run is listened to no longer"


def test_nothing_is_done_where_everything_fits() -> None:
    machine = Machine(device_bytes=1 << 40)
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    plan = auto.plan
    assert plan is not None
    assert plan.declined is not None
    assert plan.declined.startswith("fits in ")
    assert str(auto.outcome().lines()[0]).startswith("plan: nothing to move: ")


def test_another_length_is_planned_at_once_and_remembered() -> None:
    machine = tight(9)
    auto = make(machine)
    for _ in range(6):
        step(auto, machine)
    first = auto.plan
    step(auto, machine, tokens=2 * TOKENS)
    second = auto.plan
    assert second is not None
    assert second.problem.profile.signature.tokens == 2 * TOKENS
    assert machine.used[-1] is second
    step(auto, machine)
    assert auto.plan is first
    assert machine.used[-1] is first
    assert auto.outcome().plans == 2


def test_lengths_that_never_come_again_are_measured_as_one_and_share_plans() -> None:
    machine = tight(30)
    auto = make(machine)
    drawn = random.Random(3)
    lengths = drawn.sample(range(TOKENS, 3 * TOKENS), 2 * TOKENS)
    for number, length in enumerate(lengths):
        step(auto, machine, tokens=length)
        if number < 2:
            assert auto.plan is None
            assert machine.used[-1] is MEASURING
        else:
            assert auto.plan is not None
            made_for = auto.plan.problem.profile.signature.tokens
            assert length <= made_for <= 1.25 * length, "never for fewer tokens, nor for many more"
    assert auto.outcome().plans <= 14, "at most eight an octave, and the first"


def test_the_time_of_a_step_with_a_trial_is_compared_with_nothing() -> None:
    machine = tight()
    auto = make(machine)
    for _ in range(3):
        step(auto, machine)
    machine.slowness, machine.trials = 1.5, 1
    before = auto.plan
    for _ in range(4):
        step(auto, machine)
    assert auto.plan is before
    assert auto.outcome().phase == "settled"


def test_evaluation_is_no_step() -> None:
    machine = tight()
    auto = make(machine)
    step(auto, machine)
    for _ in range(5):
        auto.before_forward()
        with torch.no_grad():
            auto.before_layer((torch.zeros(2, TOKENS, 8),), {})
    assert auto.outcome().phase == "profiling", "one training step was concluded, once"
    assert machine.used == [MEASURING]


def test_nothing_changes_while_anything_is_saved() -> None:
    machine = tight()
    auto = make(machine)
    step(auto, machine)
    machine.idle = False
    for _ in range(5):
        auto.before_forward()
        auto.before_layer((torch.zeros(2, 4 * TOKENS, 8),), {})
    assert machine.used == [MEASURING]
    assert auto.outcome().phase == "warm up"
    machine.idle = True
    auto.before_forward()
    assert auto.outcome().phase == "profiling"


def test_a_step_that_takes_longer_than_predicted_is_planned_anew() -> None:
    machine = tight()
    auto = make(machine)
    for _ in range(3):
        step(auto, machine)
    before = auto.plan
    machine.slowness = 1.5
    for _ in range(6):
        step(auto, machine)
    after = auto.plan
    assert before is not None
    assert after is not None
    assert after.stages[0].compute_s == pytest.approx(1.5 * before.stages[0].compute_s, rel=1e-3)
    assert auto.outcome().phase == "settled"


def test_recompute_is_taken_to_be_as_much_slower_as_the_machine() -> None:
    machine = tight()
    auto = make(machine)
    for _ in range(3):
        step(auto, machine)
    before = auto.plan
    machine.slowness = 1.5
    for _ in range(4):
        step(auto, machine)
    after = auto.plan
    assert before is not None
    assert after is not None
    was, now = (plan.problem.profile.classes[0].points for plan in (before, after))
    assert [point.recompute_s for point in now] == pytest.approx([1.5 * point.recompute_s for point in was])


def test_one_slow_step_changes_no_plan() -> None:
    machine = tight()
    auto = make(machine)
    for _ in range(3):
        step(auto, machine)
    before = auto.plan
    machine.slowness = 1.5
    step(auto, machine)  # the plan's second step, which is compared
    machine.slowness = 1.0
    for _ in range(3):
        step(auto, machine)
    assert auto.plan is before
    assert auto.outcome().phase == "settled"


def settled_at_a_pace() -> tuple[Machine, AutoPlan, Callable[[int, float], None]]:
    """A settled plan, and steps that take so many seconds as wholes."""
    machine = tight()
    auto = make(machine)

    def steps(count: int, seconds: float) -> None:
        for _ in range(count):
            step(auto, machine)
            machine.clock_ns += round(seconds * 1e9)

    steps(6, 1.0)
    assert auto.outcome().phase == "settled"
    return machine, auto, steps


def test_a_machine_that_has_become_slower_is_measured_again_though_all_was_settled() -> None:
    machine, auto, steps = settled_at_a_pace()
    steps(30, 1.0)
    before = auto.plan
    assert machine.heard_by is None
    machine.slowness = 1.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(30, 1.5)
    after, outcome = auto.plan, auto.outcome()
    assert before is not None
    assert after is not None
    assert after.stages[0].compute_s == pytest.approx(1.5 * before.stages[0].compute_s, rel=1e-3)
    assert outcome.phase == "settled"
    assert outcome.measured_s == pytest.approx(after.stages[0].microbatch_s, rel=0.01)
    assert machine.heard_by is None


def test_a_slower_program_around_the_layers_is_looked_at_once_and_keeps_its_plan() -> None:
    machine, auto, steps = settled_at_a_pace()
    steps(30, 1.0)
    before, looks = auto.plan, machine.listened
    machine.slowness = 1.05  # too little for another plan
    steps(60, 1.5)  # its data comes more slowly, say
    assert auto.plan is before
    assert machine.listened == looks + 1


def test_steps_that_take_long_now_and_then_are_not_looked_at() -> None:
    machine, _, steps = settled_at_a_pace()
    steps(20, 1.0)
    looks = machine.listened
    for _ in range(20):
        steps(2, 3.0)
        steps(3, 1.0)
    assert machine.listened == looks


def test_a_prediction_that_never_holds_is_said_once_and_the_plan_stays() -> None:
    machine = tight()
    auto = make(machine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3 + 2 * (MAX_CORRECTIONS + 3)):
            machine.slowness = 1.3 ** (number + 1)
            step(auto, machine)
    said = [str(one.message) for one in told if one.category is RuntimeWarning]
    assert len(said) == 1, "one warning, however often"
    assert said[0].startswith(f"the plan for 2 x {TOKENS} tokens predicts")
    assert auto.outcome().phase == "settled"


@pytest.mark.parametrize("more", [0, LAYER_BYTES])
def test_a_plan_that_comes_out_the_same_is_not_tried_again(more: int) -> None:
    machine = tight()
    machine.late, machine.disk_bytes, machine.host_bytes = LAYER_BYTES // 2, 1 << 40, LAYER_BYTES
    machine.hidden_bytes = machine.late + more  # of saved tensors, in each step by a plan
    machine.unexplained_bytes = -more
    auto, phases = make(machine), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            step(auto, machine)
            phases.append(auto.outcome().phase)
    assert phases[2:] == ["planned", "comparing", "settled", "settled"]
    said = [str(one.message) for one in told if one.category is RuntimeWarning]
    assert len(said) == bool(more), "what is on its way to the disk was predicted"
    outcome = auto.outcome()
    assert outcome.predicted_peak_bytes == outcome.plan.stages[0].peak_device_bytes + machine.late


def test_replanning_is_quick(record_property: Any) -> None:
    machine = tight(20)
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    begin = time.perf_counter()
    for length in (72, 80, 88, 96):
        step(auto, machine, tokens=length)
    record_property("replan_ms", (time.perf_counter() - begin) / 4 * 1e3)
    assert auto.outcome().plans == 5
