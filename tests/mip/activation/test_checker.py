"""The checker of activation plans names the rule that is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from activation_problems import layer, machine, profile_of, random_problem, with_codes, with_collectives

from memo.errors import PlanInvalid
from memo.events import TierName
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    StagePrediction,
    check_plan,
    predict_stages,
    require_valid,
)
from memo.mip.activation.checker import Rule
from memo.mip.activation.simulator import simulate
from memo.mip.inputs import ALL, ATTENTION, MATMULS, EmbeddingOrHeadProfile, PipelineSchedule, PointProfile, StaticBytes

BLOCK = layer(always=20, all=140, matmuls=(70, 2.0), attention=None, static=StaticBytes(other=10))
ENDS = EmbeddingOrHeadProfile(
    forward_s=1.0, backward_s=2.0, saved_bytes=7, transient_bytes=11, static=StaticBytes(other=3)
)
HALF = LayerPlan(point=MATMULS, kept=0.2, host=0.5, disk=0.3)
LAYERS = (HALF, HALF, LayerPlan(), LayerPlan())

# By hand, for four layers of which the first two save 20 + 70 bytes and keep 18: parameters and the embedding's bytes are
# 4 * 10 + 2 * 3 + 7; at layer 3 there stand 18 + 18 - 18 of layer 0 (layer 1 has left), layers 2 and 3 whole; at the head
# both keep 18, layer 2 keeps 160, layer 3 stands whole, the head holds 7 + 11.
STATIC = 4 * 10 + 2 * 3 + 7
PEAK = STATIC + 18 + 18 + 160 + 160 + 7 + 11
HOST, DISK = 2 * 45, 2 * 27
ROOMY = Budgets(device_bytes=1 << 30, host_bytes=1 << 30, disk_bytes=1 << 30)


def plan_of(
    *layers: LayerPlan, budgets: Budgets | None = None, pipeline: Pipeline | None = None, **rates: float
) -> ActivationPlan:
    problem = ActivationProblem(
        profile=profile_of(*[BLOCK] * len(layers), embedding=ENDS, head=ENDS),
        hardware=machine(**rates),
        budgets=budgets or Budgets(device_bytes=PEAK, host_bytes=HOST, disk_bytes=DISK),
        pipeline=pipeline or Pipeline(),
    )
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))


def test_a_plan_that_uses_its_budgets_to_the_last_byte_is_valid_and_predicted_as_on_paper() -> None:
    plan = plan_of(*LAYERS)
    assert check_plan(plan) is None
    stage = plan.stages[0]
    assert (stage.peak_device_bytes, stage.peak_host_bytes, stage.peak_disk_bytes) == (PEAK, HOST, DISK)
    # Forward 4 x 10 and backward 4 x 20, ends 2 x 3. Two recomputes of 2. Out: 72 bytes at 10 a second by the link take
    # 7.2, but the disk's 27 at 4 take 6.75: both within 10. In: within 20.
    assert stage.compute_s == pytest.approx(126.0)
    assert stage.recompute_s == pytest.approx(4.0)
    assert stage.stall_s == 0.0
    assert plan.step_s == pytest.approx(130.0)


@pytest.mark.parametrize(
    ("rate", "late_s"),
    [
        ({"d2h_bytes_per_s": 5.0}, {"stall_d2h_s": 2 * (72 / 5 - 10)}),
        ({"h2d_bytes_per_s": 3.0}, {"stall_h2d_s": (72 / 3 - 20 - 2) + (72 / 3 - 20)}),
        ({"disk_write_bytes_per_s": 2.0}, {"stall_disk_write_s": 2 * (27 / 2 - 10)}),
        ({"disk_read_bytes_per_s": 1.25}, {"stall_disk_read_s": (27 / 1.25 - 20)}),
        # Of a link of 10 the disk takes its half, 5 a second, until the host's 45 are through at 9 s: nothing is left of
        # its 27 then. With a drive of 6 and 45 against 27 the link is what counts.
        ({"disk_write_bytes_per_s": 6.0}, {}),
    ],
)
def test_stalls_are_counted_by_cause_as_on_paper(rate: dict[str, float], late_s: dict[str, float]) -> None:
    plan = plan_of(*LAYERS, **rate)
    assert check_plan(plan) is None
    found = dataclasses.asdict(plan.stages[0])
    for cause in ("stall_d2h_s", "stall_h2d_s", "stall_disk_write_s", "stall_disk_read_s"):
        assert found[cause] == pytest.approx(late_s.get(cause, 0.0)), cause


def test_the_disks_bytes_wait_for_the_hosts_on_a_link_that_is_little_faster_than_the_disk() -> None:
    mostly_disk = LayerPlan(point=MATMULS, kept=0.2, host=0.1, disk=0.7)
    plan = plan_of(
        mostly_disk, LayerPlan(), LayerPlan(), budgets=ROOMY, d2h_bytes_per_s=5.0, disk_write_bytes_per_s=4.0
    )
    # 9 bytes and as many of the 63 go at 2.5 a second each, the other 54 at 4: 3.6 + 13.5 s in a window of 10.
    assert plan.stages[0].stall_disk_write_s == pytest.approx(7.1)
    assert check_plan(plan) is None


def budgets(**changes: float | None) -> Budgets:
    return dataclasses.replace(Budgets(device_bytes=PEAK, host_bytes=HOST, disk_bytes=DISK), **changes)


def claiming(**figures: float) -> ActivationPlan:
    plan = plan_of(*LAYERS)
    return dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], **figures),))


def elsewhere(**rates: float) -> ActivationPlan:
    plan = plan_of(*LAYERS)
    return dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, hardware=machine(**rates)))


# At point matmuls 20 + 80 bytes are saved of which 20 stand beside all that autograd saves. A running layer and what the
# one before it saves are the peak, as the layers of the middle keep nothing.
GIVEN = layer(always=20, all=140, matmuls=(80, 1.0), beside=20, attention=4.0)
MIDDLE = LayerPlan(point=MATMULS, kept=0.0, host=1.0)
GIVEN_PEAK = 160 + 20 + 100


def given_plan(device_bytes: int) -> ActivationPlan:
    layers = (MIDDLE, MIDDLE, MIDDLE, LayerPlan())
    problem = ActivationProblem(
        profile=profile_of(*[GIVEN] * 4),
        hardware=machine(),
        budgets=dataclasses.replace(ROOMY, device_bytes=device_bytes),
    )
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))


def test_what_a_recompute_is_given_stands_beside_the_running_layer() -> None:
    plan = given_plan(GIVEN_PEAK)
    assert plan.stages[0].peak_device_bytes == GIVEN_PEAK
    assert check_plan(plan) is None
    assert simulate(plan).stages[0].peak(TierName.DEVICE).nbytes == GIVEN_PEAK


# Recomputes hold 60 bytes on top of backward's transient of 5, beside 20 + 10 bytes on their way. Layers 0 to 2 keep none.
CURVE = dataclasses.replace(
    GIVEN,
    points=(
        PointProfile(name=ALL, saved_bytes=140),
        PointProfile(name="p1", saved_bytes=80, recompute_s=1.0, held_bytes=40),
        PointProfile(name="p2", saved_bytes=10, recompute_s=4.0, held_bytes=60),
    ),
    forward_transient_bytes=30,
    backward_transient_bytes=5,
)
HOLDING = LayerPlan(point="p2", kept=0.0, host=1.0)
HOLDING_PEAK = 160 + 30 + 5 + 60


def holding_plan(device_bytes: int) -> ActivationPlan:
    layers = (HOLDING, HOLDING, HOLDING, LayerPlan())
    problem = ActivationProblem(
        profile=profile_of(*[CURVE] * 4),
        hardware=machine(),
        budgets=dataclasses.replace(ROOMY, device_bytes=device_bytes),
    )
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))


def test_what_a_recompute_holds_comes_on_top_of_backwards_transient() -> None:
    plan = holding_plan(HOLDING_PEAK)
    assert plan.stages[0].peak_device_bytes == HOLDING_PEAK
    assert check_plan(plan) is None
    assert simulate(plan).stages[0].peak(TierName.DEVICE).nbytes == HOLDING_PEAK
    # Without a recompute, what forward holds is the peak.
    kept = dataclasses.replace(plan, layers=(LayerPlan(kept=0.0, host=1.0),) * 3 + (LayerPlan(),))
    assert predict_stages(plan.problem, kept.layers)[0].peak_device_bytes == 2 * 160 + 30


def claiming_less(plan: ActivationPlan, device_bytes: int) -> ActivationPlan:
    """The plan with a smaller budget, and predictions as if recomputes held nothing."""
    budgets = dataclasses.replace(plan.problem.budgets, device_bytes=device_bytes)
    stages = tuple(dataclasses.replace(stage, peak_device_bytes=device_bytes) for stage in plan.stages)
    return dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, budgets=budgets), stages=stages)


BROKEN = {
    "no byte for what a recompute holds": (holding_plan(HOLDING_PEAK - 1), Rule.DEVICE),
    "no byte for what a recompute holds, nor a word of it": (
        claiming_less(holding_plan(HOLDING_PEAK), HOLDING_PEAK - 1),
        Rule.DEVICE,
    ),
    "a claim that recomputes hold nothing": (
        dataclasses.replace(
            holding_plan(1 << 30), stages=claiming_less(holding_plan(1 << 30), HOLDING_PEAK - 50).stages
        ),
        Rule.PREDICTION,
    ),
    "no byte for what a recompute is given": (given_plan(GIVEN_PEAK - 1), Rule.DEVICE),
    "one byte too few on the device": (plan_of(*LAYERS, budgets=budgets(device_bytes=PEAK - 1)), Rule.DEVICE),
    "one byte too few on the host": (plan_of(*LAYERS, budgets=budgets(host_bytes=HOST - 1)), Rule.HOST),
    "one byte too few on the disk": (plan_of(*LAYERS, budgets=budgets(disk_bytes=DISK - 1)), Rule.DISK),
    "two ranks on one node's host": (plan_of(*LAYERS, budgets=budgets(ranks_per_node=2)), Rule.HOST),
    "more written in a day than allowed": (
        plan_of(*LAYERS, budgets=budgets(disk_wear_bytes_per_day=DISK / 130 * 86400 * 0.999)),
        Rule.WEAR,
    ),
    "no host at all": (plan_of(*LAYERS, budgets=budgets(host_bytes=0)), Rule.TIER),
    "no drive": (elsewhere(disk_read_bytes_per_s=0.0), Rule.TIER),
    "the last layer moves": (plan_of(*LAYERS[:3], HALF), Rule.LAST),
    "the last layer of the first stage moves": (
        plan_of(HALF, HALF, HALF, LayerPlan(), pipeline=Pipeline(stages=2)),
        Rule.LAST,
    ),
    "a point that the layers do not have": (
        dataclasses.replace(plan_of(*LAYERS), layers=(LayerPlan(point=ATTENTION), *LAYERS[1:])),
        Rule.POINT,
    ),
    "a step faster than its rules allow": (claiming(compute_s=125.0), Rule.PREDICTION),
    "a smaller peak than there is": (claiming(peak_device_bytes=PEAK - 40), Rule.PREDICTION),
    "less on the host than there is": (claiming(peak_host_bytes=HOST - 40), Rule.PREDICTION),
    "less written than there is": (claiming(disk_written_bytes=0), Rule.PREDICTION),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    plan, rule = BROKEN[name]
    violation = check_plan(plan)
    assert violation is not None
    assert violation.rule is rule
    with pytest.raises(PlanInvalid, match=f"rule {rule}: "):
        require_valid(plan)


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize("factor", [0.0, 0.5, 0.99, 1.01, 2.0])
def test_no_figure_of_a_plan_may_be_another_one(schedule: PipelineSchedule, factor: float) -> None:
    """Neither better nor worse; of every stage and every chunk."""
    pipeline = Pipeline(stages=2, microbatches=4, schedule=schedule)
    problem = with_codes(with_collectives(random_problem(3, layers=9, classes=2, pipeline=pipeline), 3), 3)
    problem = dataclasses.replace(problem, budgets=dataclasses.replace(ROOMY, device_bytes=1 << 40, host_bytes=1 << 40))
    lasts = {problem.stages[stage].indices[-1] for stage in range(2)}
    moved = LayerPlan(point=MATMULS, kept=0.2, host=0.5, disk=0.3)
    layers = tuple(LayerPlan() if number in lasts else moved for number in range(9))
    plan = ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))
    assert check_plan(plan) is None
    changed = 0
    for number, stage in enumerate(plan.stages):
        for other in changed_figures(stage, factor):
            stages = (*plan.stages[:number], other, *plan.stages[number + 1 :])
            violation = check_plan(dataclasses.replace(plan, stages=stages))
            assert violation is not None, other
            assert violation.rule is Rule.PREDICTION
            changed += 1
    assert changed >= 2 * 8


def changed_figures(stage: StagePrediction, factor: float) -> Iterator[StagePrediction]:
    for field in dataclasses.fields(stage):
        value = getattr(stage, field.name)
        if field.name == "chunks":
            for number, chunk in enumerate(value or ()):
                for name in ("forward_s", "backward_s", "weight_s"):
                    if getattr(chunk, name):
                        other = dataclasses.replace(chunk, **{name: factor * getattr(chunk, name)})
                        yield dataclasses.replace(stage, chunks=(*value[:number], other, *value[number + 1 :]))
        elif value:
            yield dataclasses.replace(stage, **{field.name: type(value)(factor * value)})


def test_a_step_that_is_too_long_to_be_simulated_is_no_valid_one() -> None:
    plan = plan_of(*LAYERS, budgets=ROOMY, pipeline=Pipeline(microbatches=1 << 17, schedule=PipelineSchedule.GPIPE))
    violation = check_plan(plan)
    assert violation is not None
    assert "131072 microbatches of 4 layers are more than the 200000 passes that are simulated" in violation.message


def test_wear_just_within_its_budget_is_valid() -> None:
    assert check_plan(plan_of(*LAYERS, budgets=budgets(disk_wear_bytes_per_day=DISK / 130 * 86400 * 1.001))) is None


def test_a_pipeline_holds_more_microbatches_in_its_first_stage() -> None:
    moved = LayerPlan(kept=0.25, host=0.75)
    layers = (moved, LayerPlan(), moved, LayerPlan())
    pipeline = Pipeline(stages=2, microbatches=3)
    plan = plan_of(*layers, budgets=ROOMY, pipeline=pipeline)
    # Stage 0 holds two microbatches: the other one's 40 + 160, both buffers, parameters, the embedding's bytes of both.
    assert [stage.peak_host_bytes for stage in plan.stages] == [2 * 120, 120]
    assert plan.stages[0].peak_device_bytes == (40 + 160) + 2 * 160 + 2 * 10 + 3 + 2 * 7
    assert check_plan(plan) is None
    # Of 120 bytes at 10 a second 2 s do not fit into the next forward: forward 1 + 20 + 2, backward 42 on each stage. Stage
    # 1 runs F B F B F B from 23 s on, and stage 0's last backward follows.
    assert plan.step_s == pytest.approx(23 + 3 * (23 + 42) + 42)
