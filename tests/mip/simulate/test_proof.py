"""Simulation of plans before their use: a plan whose step differs from its prediction is refused."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from activation_problems import random_problem

from memo.errors import Infeasible, PlanInvalid
from memo.mip.activation import Pipeline, proof, solve_problem
from memo.mip.activation.proof import most_early_s, play, verify_by_simulation
from memo.mip.inputs import PipelineSchedule
from memo.mip.simulate import simulate

PLAN = solve_problem(random_problem(2, layers=8))


def test_a_plan_that_keeps_its_word_is_simulated_to_the_same_time() -> None:
    assert verify_by_simulation(PLAN).step_s == pytest.approx(PLAN.step_s, rel=1e-9)


def test_one_that_promises_three_percent_too_much_is_refused() -> None:
    (stage,) = PLAN.stages
    sooner = dataclasses.replace(stage, compute_s=stage.compute_s - 0.03 * stage.microbatch_s)
    with pytest.raises(PlanInvalid, match="played event by event"):
        verify_by_simulation(dataclasses.replace(PLAN, stages=(sooner,)))


def test_one_that_breaks_a_budget_is_refused() -> None:
    budgets = dataclasses.replace(PLAN.problem.budgets, device_bytes=PLAN.stages[0].peak_device_bytes - (1 << 20))
    with pytest.raises(PlanInvalid, match="device holds"):
        verify_by_simulation(dataclasses.replace(PLAN, problem=dataclasses.replace(PLAN.problem, budgets=budgets)))


@pytest.mark.parametrize(
    ("schedule", "stages"), [(PipelineSchedule.ONE_F_ONE_B, 1), *((schedule, 3) for schedule in PipelineSchedule)]
)
def test_of_a_long_step_the_first_microbatches_are_played(schedule: PipelineSchedule, stages: int) -> None:
    """They hold what the whole step holds, and the rest is as long as predicted."""
    pipeline = Pipeline(stages=stages, microbatches=24, schedule=schedule)
    for seed in range(8):
        try:
            plan = solve_problem(random_problem(seed, layers=9, classes=2, pipeline=pipeline))
        except Infeasible:
            continue
        whole = simulate(plan)
        played, beginning = play(plan, most=9 * 12)
        if schedule is PipelineSchedule.GPIPE:  # all are held at once
            assert played is plan
            assert beginning == whole
            continue
        assert played.problem.pipeline.microbatches == 12
        assert len(beginning.stages[0].spans) < 0.6 * len(whole.stages[0].spans)
        assert [[peak.nbytes for peak in stage.peaks] for stage in beginning.stages] == [
            [peak.nbytes for peak in stage.peaks] for stage in whole.stages
        ]
        late = 2 * proof.AGREEMENT if pipeline.chunks == 1 else 2 * proof.AGREEMENT_IN_TURNS
        assert abs(beginning.whole_step_s - whole.step_s) <= late * whole.step_s + most_early_s(plan)


def test_a_step_that_is_too_long_to_play_is_proven_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dataclasses.replace(random_problem(2, layers=8), pipeline=Pipeline(microbatches=4_000))
    plan = solve_problem(problem)
    monkeypatch.setattr(proof, "play", functools.partial(play, most=800))
    assert len(verify_by_simulation(plan).stages[0].spans) < 8 * 4_000
    assert verify_by_simulation(plan).whole_step_s == pytest.approx(plan.step_s, rel=0.02)
    (stage,) = plan.stages
    sooner = dataclasses.replace(plan, stages=(dataclasses.replace(stage, compute_s=0.9 * stage.compute_s),))
    budgets = dataclasses.replace(problem.budgets, device_bytes=stage.peak_device_bytes - (1 << 20))
    with pytest.raises(PlanInvalid, match="device holds"):
        verify_by_simulation(dataclasses.replace(plan, problem=dataclasses.replace(problem, budgets=budgets)))
    with pytest.raises(PlanInvalid, match="played event by event"):
        verify_by_simulation(sooner)
