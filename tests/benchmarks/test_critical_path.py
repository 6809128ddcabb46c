"""The bound that stands for Merak's schedule is of 1F1B's arithmetic, and is what hand-drawn steps say."""

from __future__ import annotations

import pytest

from benchmarks.critical_path import Case, StageSeconds, gain, passes_s, planned_stages, shifted_order, shifted_s
from memo.mip.activation import Pipeline
from memo.mip.inputs import Pass, PipelineSchedule


def stages(*recompute_s: float) -> list[StageSeconds]:
    return [StageSeconds(forward_s=1.0, backward_s=2.0, recompute_s=seconds) for seconds in recompute_s]


def orders(pipeline: Pipeline) -> list[list[Pass]]:
    return [list(pipeline.order(stage)) for stage in range(pipeline.stages)]


def test_without_recompute_ahead_it_is_the_planners_1f1b() -> None:
    case = Case(model="1.5B", tp=1, pp=4, sequences=32)
    plan = case.request(4, PipelineSchedule.ONE_F_ONE_B, None, None).plan()
    problem = plan.problem
    send_s, last = problem.profile.send_s, problem.update
    passes = passes_s(orders(problem.pipeline), planned_stages(plan), send_s, ahead=False)
    sync_s = plan.stages[0].sync_s
    assert passes + sync_s + last.optimizer_s + last.optimizer_exchange_s == pytest.approx(plan.step_s, rel=1e-3)
    assert shifted_s(plan, planned_stages(plan)) <= plan.step_s


def test_recompute_ahead_leaves_it_out_of_the_way_back() -> None:
    """Four stages, eight microbatches: 4 s each, and 4 s more for each stage on the way; ahead 3 s more."""
    pipeline = Pipeline(stages=4, microbatches=8)
    alike = stages(1.0, 1.0, 1.0, 1.0)
    assert passes_s(orders(pipeline), alike, 0.0, ahead=False) == 4 * 8 + 4 * 3
    assert passes_s(orders(pipeline), alike, 0.0, ahead=True) == 4 * 8 + 3 * 3


def test_the_last_stage_but_one_runs_its_third_forward_before_its_first_backward() -> None:
    pipeline = Pipeline(stages=4, microbatches=5)
    assert "".join(shifted_order(pipeline, 2)) == "FFFBBFBFBB"
    assert [shifted_order(pipeline, stage) for stage in (0, 1, 3)] == [orders(pipeline)[stage] for stage in (0, 1, 3)]


def test_a_gain_is_memos_best_schedule_over_the_bound_each_at_its_own_microbatch() -> None:
    assert gain({"1f1b": {1: 6.0, 2: 4.0}, "zbv": {1: 3.0}, "shifted": {1: 5.0, 2: 2.0}}) == 1.5
