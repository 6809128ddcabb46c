"""Simulation of plans before their use: a plan whose step differs from its prediction is refused."""

from __future__ import annotations

import dataclasses

import pytest
from activation_problems import layer, machine, profile_of, random_problem

from memo.errors import PlanInvalid
from memo.mip.activation.cost import predict_stages
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, Budgets, LayerPlan, Pipeline
from memo.mip.activation.solver import solve_problem
from memo.mip.inputs.pipeline_schedules import PipelineSchedule
from memo.mip.inputs.profile import ATTENTION
from memo.mip.simulate.proof import most_early_s, prove

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


@pytest.mark.parametrize(
    ("pipeline", "spared"),
    [
        (Pipeline(microbatches=3), 3),
        (Pipeline(microbatches=3, schedule=PipelineSchedule.GPIPE), 1),
        (Pipeline(stages=2, microbatches=3), 3 + 1),
        (Pipeline(stages=2, microbatches=2, schedule=PipelineSchedule.INTERLEAVED), 2 + 1),
    ],
    ids=lambda one: f"{one.stages} stages, {one.schedule}" if isinstance(one, Pipeline) else "",
)
def test_a_step_is_shorter_by_the_recomputes_that_it_is_spared(pipeline: Pipeline, spared: int) -> None:
    """A second a layer: the last stage's last layer in each microbatch, any other one's in its last alone."""
    block = layer(matmuls=None, attention=1.0)
    problem = ActivationProblem(
        profile=profile_of(*[block] * (pipeline.stages * pipeline.chunks)),
        hardware=machine(),
        budgets=Budgets(device_bytes=1 << 40),
        pipeline=pipeline,
    )
    layers = tuple(LayerPlan(points={ATTENTION: 1.0}) for _ in problem.profile.layers)
    plan = ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))
    assert most_early_s(plan) == pytest.approx(spared)
    assert plan.step_s - spared <= prove(plan).step_s < plan.step_s
