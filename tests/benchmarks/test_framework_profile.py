"""Profiles of frameworks' training runs: states, collectives of weights and ends."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.published.fit import read_fitted
from benchmarks.published.framework_profile import profile_of_training
from benchmarks.published.framework_training import ADAM_MIXED, FrameworkTraining, Loss, Recompute
from memo.errors import UsageError
from memo.gpt import preset
from memo.gpt.arithmetic import StepLayout
from memo.gpt.arithmetic.flops import layer_parameter_count
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    check_plan,
    predict_stages,
)
from memo.mip.inputs import ALL, INPUT, Hardware, Profile, hardware_preset

A100 = hardware_preset("a100-80g")
MODEL = preset("7b", max_seq=2048)
SIXTEEN = StepLayout(tokens=2048, gpus=16)


RATES = read_fitted()["a100"].rates


def profile(training: FrameworkTraining, layout: StepLayout = SIXTEEN, machine: Hardware = A100) -> Profile:
    return profile_of_training(MODEL, machine, layout, training, rates=RATES)


@pytest.mark.parametrize(("zero", "bytes_each"), [(0, 18.0), (1, 6 + 12 / 16), (2, 2 + 16 / 16), (3, 18 / 16)])
def test_each_degree_of_sharding_divides_more_of_the_states(zero: int, bytes_each: float) -> None:
    (layer,) = profile(FrameworkTraining(zero=zero)).classes
    assert layer.static_bytes == pytest.approx(bytes_each * layer_parameter_count(MODEL), abs=1)


def test_hybrid_sharding_divides_over_its_group_alone() -> None:
    (layer,) = profile(FrameworkTraining(zero=3, sharded_over=8)).classes
    assert layer.static_bytes == pytest.approx(18 / 8 * layer_parameter_count(MODEL), abs=1)
    (whole,) = profile(FrameworkTraining(zero=3)).classes
    assert layer.gather_s < whole.gather_s, "the group is one node"


def test_what_is_offloaded_is_not_on_the_gpu() -> None:
    training = FrameworkTraining(zero=3, optimizer_offload=True, parameter_offload=True)
    found = profile(training)
    assert found.classes[0].static_bytes == 0
    assert found.optimizer_s == 0
    assert profile(FrameworkTraining(zero=1, optimizer_offload=True)).classes[0].static_bytes == pytest.approx(
        (ADAM_MIXED.weight + ADAM_MIXED.gradient) * layer_parameter_count(MODEL), abs=1
    )


def test_sharding_decides_which_collectives_there_are() -> None:
    none, optimizer, everything = (profile(FrameworkTraining(zero=zero)) for zero in (0, 1, 3))
    (layer,) = none.classes
    assert layer.sync_s > 0
    assert layer.gather_s == layer.reduce_s == none.optimizer_exchange_s == 0
    assert 0 < optimizer.classes[0].sync_s < 0.7 * layer.sync_s, "a reduction without its gather"
    assert optimizer.optimizer_exchange_s > 0
    (sharded,) = everything.classes
    assert sharded.gather_s > 0
    assert sharded.reduce_s > 0
    assert sharded.sync_s == everything.optimizer_exchange_s == 0


def test_gradients_that_wait_for_the_end_are_exposed() -> None:
    beside, behind = (profile(FrameworkTraining(overlaps_gradients=overlaps)) for overlaps in (True, False))
    assert behind.classes[0].sync_s == 0
    total = 32 * beside.classes[0].sync_s + beside.embedding.sync_s + beside.head.sync_s
    assert behind.optimizer_exchange_s == pytest.approx(total, rel=0.02), "one collective has less latency than many"


def test_weights_gathered_for_the_step_stay_with_their_gradients() -> None:
    pipelined = StepLayout(tokens=2048, gpus=16, pp=2)
    training = FrameworkTraining(zero=3, whole_in_step=True)
    (layer,) = profile(training, pipelined).classes
    assert layer.gather_s == layer.reduce_s == 0
    assert layer.static_bytes == pytest.approx((18 / 8 + 2 + 4) * layer_parameter_count(MODEL), abs=1)


def test_the_loss_decides_what_the_head_holds() -> None:
    held = {loss: profile(FrameworkTraining(loss=loss)).head.transient_bytes for loss in Loss}
    assert held[Loss.CHUNKED] < held[Loss.FUSED] < held[Loss.FLOAT32] < held[Loss.COMPILED] < held[Loss.EAGER]
    assert held[Loss.FLOAT32] - held[Loss.FUSED] == 4 * 2048 * MODEL.vocab_size


def test_a_fixed_plan_of_a_framework_passes_the_checker() -> None:
    """Every layer at its class's only point; time and peaks are the plan's own."""
    training = FrameworkTraining(zero=3, recompute=Recompute.FULL)
    found = profile(training, StepLayout(tokens=2048, gpus=16, pp=2))
    problem = ActivationProblem(
        profile=found,
        hardware=A100,
        budgets=Budgets(device_bytes=A100.device_bytes),
        pipeline=Pipeline(stages=2, microbatches=4),
    )
    layers = (LayerPlan(),) * MODEL.layers
    plan = ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))
    assert not check_plan(plan)
    assert plan.step_s > 4 * sum(layer.forward_s + layer.backward_s for layer in found.layer_profiles()) / 2


def test_a_plan_with_every_layer_at_its_input_takes_the_time_of_full_recompute() -> None:
    """And holds as much: one whole layer at a time, and the inputs of the others."""
    plans = []
    for recompute, point in ((Recompute.FULL, ALL), (Recompute.NONE, INPUT)):
        problem = ActivationProblem(
            profile=profile(FrameworkTraining(recompute=recompute)),
            hardware=A100,
            budgets=Budgets(device_bytes=A100.device_bytes),
            pipeline=Pipeline(microbatches=3),
        )
        layers = (LayerPlan(point=point),) * MODEL.layers
        plans.append(ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers)))
    fixed, planned = plans
    assert planned.step_s == pytest.approx(fixed.step_s)
    assert fixed.stages[0].recompute_s == 0 < planned.stages[0].recompute_s
    whole = planned.problem.profile.classes[0].full_bytes
    assert 0 <= planned.stages[0].peak_device_bytes - fixed.stages[0].peak_device_bytes < 1.5 * whole


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(UsageError, match="zero is 4"):
        FrameworkTraining(zero=4)
    with pytest.raises(UsageError, match="only under full recompute"):
        FrameworkTraining(input_offload=True)
    with pytest.raises(UsageError, match="dropout"):
        FrameworkTraining(dropout=1.0)
    unconnected = dataclasses.replace(A100.network, nics_per_node=0, nic_bytes_per_s=0)
    with pytest.raises(UsageError, match="no network"):
        profile(FrameworkTraining(zero=3), machine=dataclasses.replace(A100, network=unconnected))
