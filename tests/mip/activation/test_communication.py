"""Collectives in plans: what hides behind which layer, the same in prediction, checker and simulator."""

from __future__ import annotations

import dataclasses

import pytest
from activation_problems import layer, machine, plan_activations, profile_of, random_problem, with_collectives
from slow_tests import first

from memo.errors import Infeasible, PlanError
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    check_plan,
    extract_stage_plan,
    predict_stages,
    solve_problem,
)
from memo.mip.activation.checker import Rule
from memo.mip.activation.layer_groups import Sharing
from memo.mip.activation.linear_program import PlanModel
from memo.mip.activation.proof import verify_by_simulation
from memo.mip.activation.whole_points import round_points
from memo.mip.inputs import EmbeddingOrHeadProfile, PipelineSchedule
from memo.mip.simulate import simulate

PIPELINES = {
    "one stage": Pipeline(microbatches=3),
    "1f1b": Pipeline(stages=3, microbatches=7),
    "gpipe": Pipeline(stages=3, microbatches=4, schedule=PipelineSchedule.GPIPE),
    "interleaved": Pipeline(stages=2, microbatches=4, schedule=PipelineSchedule.INTERLEAVED),
    "zero bubble": Pipeline(stages=2, microbatches=4, schedule=PipelineSchedule.ZERO_BUBBLE),
    "v": Pipeline(stages=2, microbatches=4, schedule=PipelineSchedule.ZERO_BUBBLE_V),
}


def kept(problem: ActivationProblem) -> ActivationPlan:
    layers = tuple(LayerPlan() for _ in problem.profile.layers)
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))


def three_layers(**rest: float) -> ActivationProblem:
    """Layers of 10 s forward and 20 s backward between two ends of 1 s and 2 s; nothing has to move."""
    end = EmbeddingOrHeadProfile(forward_s=1.0, backward_s=2.0)
    return ActivationProblem(
        profile=profile_of(*[layer(**rest)] * 3, embedding=end, head=end),
        hardware=machine(),
        budgets=Budgets(device_bytes=1 << 40),
    )


def test_gathers_are_hidden_as_far_as_the_layer_before_lasts() -> None:
    # The first one before the forward; two of 12 s beside 10 s; two of 12 s beside 20 s in backward.
    plan = kept(three_layers(gather_s=12.0))
    assert plan.stages[0].communication_s == 12 + 2 * 2
    assert plan.step_s == 3 * 30 + 2 * 3 + 16
    assert simulate(plan).step_s == pytest.approx(plan.step_s)


def test_reductions_share_the_window_with_gathers_and_the_last_one_is_exposed() -> None:
    # Backward of the middle layer has a gather and a reduction beside it, the last one a gather, the first one a reduction.
    plan = kept(three_layers(gather_s=12.0, reduce_s=15.0))
    assert plan.stages[0].communication_s == 12 + 2 * 2 + (12 + 15 - 20) + 15
    assert check_plan(plan) is None


def test_a_recompute_hides_collectives() -> None:
    problem = three_layers(gather_s=26.0, attention=4.0, matmuls=None)
    again = tuple(LayerPlan(point="attention") for _ in range(3))
    plan = ActivationPlan(problem=problem, layers=again, stages=predict_stages(problem, again))
    # In backward 26 s beside 24 s, twice; the last layer recomputes beside nothing.
    assert plan.stages[0].communication_s == 26 + 2 * 16 + 2 * 2
    assert plan.step_s - kept(problem).step_s == pytest.approx(4.0)


def test_once_a_step_reductions_follow_the_last_backward_only() -> None:
    one = kept(three_layers(sync_s=25.0))
    # Ready after 2 + 20, 42 and 62 s of backward; then 47, 72, 97: 33 s after the embedding's end at 64.
    assert one.stages[0].sync_s == 97 - 64
    problem = dataclasses.replace(one.problem, pipeline=Pipeline(microbatches=5))
    assert kept(problem).step_s == 5 * 96 + 33
    assert simulate(kept(problem)).step_s == pytest.approx(5 * 96 + 33)


def test_a_send_is_waited_for_by_the_next_stage() -> None:
    profile = dataclasses.replace(profile_of(*[layer()] * 2), send_s=3.0)
    problem = ActivationProblem(
        profile=profile,
        hardware=machine(),
        budgets=Budgets(device_bytes=1 << 40),
        pipeline=Pipeline(stages=2, microbatches=1),
    )
    assert kept(problem).step_s == 2 * 30 + 2 * 3
    # 1F1B has no slack: with two microbatches in flight, two further ones wait for a message in both directions.
    many = kept(dataclasses.replace(problem, pipeline=Pipeline(stages=2, microbatches=100)))
    assert many.step_s == pytest.approx(simulate(many).step_s)
    assert many.step_s == pytest.approx((2 * 30 + 2 * 3) + 98 * (30 + 3) + 30)


def test_a_copy_has_less_of_the_link_that_collectives_cross() -> None:
    problem = three_layers()
    shared = dataclasses.replace(problem, profile=dataclasses.replace(problem.profile, link_share=0.25))
    assert problem.machine_of(0).lanes.d2h_bytes_per_s == 10.0
    assert shared.machine_of(0).lanes.d2h_bytes_per_s == 7.5


@pytest.mark.parametrize("seeds", first([range(4), range(4, 12)], 1), ids=str)
@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_prediction_checker_and_simulator_agree_on_any_plan(pipeline: Pipeline, seeds: range) -> None:
    for seed in seeds:
        count = pipeline.stages * pipeline.chunks * 2 + seed % 3
        problem = with_collectives(random_problem(seed, layers=count, classes=1 + seed % 2, pipeline=pipeline), seed)
        try:
            plan = solve_problem(problem)  # its checker has passed it
        except Infeasible:
            continue
        verify_by_simulation(plan)
        for stage in range(pipeline.stages):
            assert check_plan(extract_stage_plan(plan, stage)) is None, seed


@pytest.mark.parametrize("seed", first(range(20), 8))
def test_layers_that_share_variables_lose_nothing(seed: int) -> None:
    problem = with_collectives(random_problem(seed, layers=9, pipeline=Pipeline(microbatches=2)), seed)
    alone, shared = PlanModel(problem, sharing=Sharing.NONE), PlanModel(problem, sharing=Sharing.INTERIOR)
    if alone.solve():
        assert shared.solve()
        assert shared.step_s >= alone.step_s * (1 - 1e-6)
        assert shared.step_s <= alone.step_s * 1.01


@pytest.mark.parametrize("seed", range(20))
def test_the_program_counts_what_the_prediction_does(seed: int) -> None:
    problem = with_collectives(random_problem(seed, layers=7, classes=2, pipeline=Pipeline(microbatches=3)), seed)
    relaxed = PlanModel(problem)
    if not relaxed.solve():
        return
    model = round_points(relaxed)
    assert model is not None
    plan = ActivationPlan(problem=problem, layers=model.layers, stages=predict_stages(problem, model.layers))
    profile = problem.profile
    assert plan.step_s - profile.optimizer_s - profile.optimizer_exchange_s == pytest.approx(model.step_s, rel=1e-5)


@pytest.mark.parametrize("field", ["communication_s", "sync_s"])
def test_a_wrong_claim_is_refused(field: str) -> None:
    plan = kept(three_layers(gather_s=12.0, sync_s=25.0))
    claimed = dataclasses.replace(plan.stages[0], **{field: getattr(plan.stages[0], field) * 0.9})
    violation = check_plan(dataclasses.replace(plan, stages=(claimed,)))
    assert violation is not None
    assert violation.rule is Rule.PREDICTION
    assert violation.message


def test_a_part_is_not_longer_than_the_whole() -> None:
    with pytest.raises(PlanError, match="communicates for longer than it runs"):
        layer(forward_exchange_s=10.5)
    with pytest.raises(PlanError, match="communicates for longer than it runs"):
        EmbeddingOrHeadProfile(forward_s=1.0, forward_exchange_s=2.0)


def test_a_plan_that_waits_for_the_network_moves_more_for_free() -> None:
    """A window is as long as what runs in it, so that copies beside exposed gathers cost nothing more."""
    budgets = Budgets(device_bytes=700, host_bytes=10_000)
    steps = {}
    for gather in (0.0, 40.0):
        profile = profile_of(*[layer(gather_s=gather, attention=None, matmuls=None)] * 6)
        steps[gather] = plan_activations(profile, machine(d2h_bytes_per_s=5.0, h2d_bytes_per_s=5.0), budgets)
    assert steps[0.0].stages[0].stall_s > 0
    assert steps[40.0].stages[0].stall_s < steps[0.0].stages[0].stall_s
