"""Plans that treat all layers alike: the fastest alpha that measured steps have room for, divided among the tiers."""

from __future__ import annotations

import dataclasses

import pytest

from memo.autoplan.uniform_plans import ALPHA_STEPS, fastest_uniform_plan, uniform_plan
from memo.mip.activation.checker import check_plan
from memo.mip.activation.plan import ActivationProblem, Budgets, LayerPlan
from memo.mip.inputs.hardware import hardware_preset
from memo.mip.inputs.profile import ALL, ATTENTION, LayerProfile, PointProfile, Profile, Role, Signature
from memo.mip.simulate.proof import prove

MIB = 1 << 20
LAYERS = 6
LAYER = LayerProfile(
    name="layer",
    always_bytes=2 * MIB,
    points=(
        PointProfile(name=ALL, saved_bytes=14 * MIB),
        PointProfile(name=ATTENTION, saved_bytes=0, recompute_s=0.5),
    ),
    forward_s=1.0,
    backward_s=2.0,
    storages=13,
    largest_storage_bytes=4 * MIB,
)


def problem(
    layer: LayerProfile = LAYER, *, host: int = 1 << 40, disk: int = 0, rate: float = 1e12
) -> ActivationProblem:
    profile = Profile(
        signature=Signature(model="m", batch=1, tokens=1024, dtype="float32"),
        role=Role.MEASURED,
        classes=(layer,),
        layers=(layer.name,) * LAYERS,
    )
    machine = dataclasses.replace(
        hardware_preset("h100"),
        d2h_bytes_per_s=rate,
        h2d_bytes_per_s=rate,
        duplex_bytes_per_s=2 * rate,
        disk_write_bytes_per_s=rate,
        disk_read_bytes_per_s=rate,
    )
    budgets = Budgets(device_bytes=1, host_bytes=host, disk_bytes=disk)
    return ActivationProblem(profile=profile, hardware=machine, budgets=budgets)


@pytest.mark.parametrize(("spare_mib", "alpha"), [(0, 0.0), (1.9, 0.0), (2, 0.125), (10, 0.625), (1000, 1.0)])
def test_a_larger_alpha_takes_what_the_measured_step_left(spare_mib: float, alpha: float) -> None:
    found, plan = fastest_uniform_plan(problem(), spare_bytes=round(spare_mib * MIB))
    assert found == alpha
    assert {part.fraction(ALL) for part in plan.layers[:-1]} == {alpha}
    assert check_plan(plan) is None
    prove(plan)


def test_a_slower_alpha_is_not_taken_for_being_larger() -> None:
    slow = problem(rate=8e6)  # a layer's bytes take as long as its forward: what is moved stalls
    found, plan = fastest_uniform_plan(slow, spare_bytes=1 << 40)
    every = [uniform_plan(slow, step / ALPHA_STEPS).stages[0].microbatch_s for step in range(ALPHA_STEPS + 1)]
    assert 0 < found < 1
    assert plan.stages[0].microbatch_s == min(every)


def test_no_more_than_the_largest_alpha_that_may_be_tried() -> None:
    assert fastest_uniform_plan(problem(), spare_bytes=1 << 40, most=0.3)[0] == 0.25
    assert fastest_uniform_plan(problem(), spare_bytes=1 << 40, most=0.0)[0] == 0.0


def test_what_the_host_has_no_room_for_goes_to_the_disk_and_then_stays() -> None:
    moved = (LAYERS - 1) * LAYER.full_bytes
    assert uniform_plan(problem(), 1.0).layers[0].host == 1.0
    both = uniform_plan(problem(host=moved // 2, disk=1 << 40), 1.0).layers[0]
    assert 0.25 <= both.host < 0.5
    assert both.disk == 1 - both.host
    stays = uniform_plan(problem(host=moved // 2), 1.0).layers[0]
    assert 0.25 <= stays.host < 0.5
    assert stays.kept == 1 - stays.host
    assert uniform_plan(problem(host=0, disk=1 << 40), 1.0).layers[0].disk == 1.0


def test_the_last_layer_stays_whole() -> None:
    assert uniform_plan(problem(), 0.5).layers[-1] == LayerPlan()


@pytest.mark.parametrize(
    ("layer", "alpha", "point"),
    [
        (dataclasses.replace(LAYER, divisible=False), 0.5, ATTENTION),
        (dataclasses.replace(LAYER, divisible=False), 1.0, ALL),
        (dataclasses.replace(LAYER, points=LAYER.points[:1]), 0.5, ALL),
    ],
)
def test_a_layer_that_cannot_be_divided_is_at_one_point(layer: LayerProfile, alpha: float, point: str) -> None:
    assert uniform_plan(problem(layer), alpha).layers[0].points == {point: 1.0}


def test_what_no_lane_can_move_stays() -> None:
    assert {part.kept for part in uniform_plan(problem(rate=0.0), 0.0).layers} == {1.0}
    assert {part.kept for part in uniform_plan(problem(host=0), 0.0).layers} == {1.0}
