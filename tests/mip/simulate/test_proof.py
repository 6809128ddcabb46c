"""Simulation of plans before their use: a plan whose step differs from its prediction is refused."""

from __future__ import annotations

import dataclasses

import pytest
from activation_problems import random_problem

from memo.errors import PlanInvalid
from memo.mip.activation.solver import solve_problem
from memo.mip.simulate.proof import prove

PLAN = solve_problem(random_problem(2, layers=8))


def test_a_plan_that_keeps_its_word_is_simulated_to_the_same_time() -> None:
    assert prove(PLAN).step_s == pytest.approx(PLAN.step_s, rel=1e-9)


def test_one_that_promises_three_percent_too_much_is_refused() -> None:
    (stage,) = PLAN.stages
    sooner = dataclasses.replace(stage, compute_s=stage.compute_s - 0.03 * stage.microbatch_s)
    with pytest.raises(PlanInvalid, match="played event by event"):
        prove(dataclasses.replace(PLAN, stages=(sooner,)))


def test_one_that_breaks_a_budget_is_refused() -> None:
    budgets = dataclasses.replace(PLAN.problem.budgets, device_bytes=PLAN.stages[0].peak_device_bytes - (1 << 20))
    with pytest.raises(PlanInvalid, match="device holds"):
        prove(dataclasses.replace(PLAN, problem=dataclasses.replace(PLAN.problem, budgets=budgets)))
