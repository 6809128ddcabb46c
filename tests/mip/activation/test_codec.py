"""A codec in activation plans: fewer bytes on links and in tiers, time of coding, exact bytes of recomputed layers."""

from __future__ import annotations

import collections
import dataclasses
import json

import pytest
from activation_problems import coded, layer, machine, plan_activations, profile_of, with_codes
from step_problems import random_step

from memo.errors import Infeasible, PlanError
from memo.mip.activation import Budgets, LayerPlan, check_plan, fits, plan_to_json, relaxed_step_s, solve_problem
from memo.mip.activation.checker import Rule
from memo.mip.activation.files import plan_from_json
from memo.mip.activation.proof import verify_by_simulation
from memo.mip.inputs import LayerProfile, Profile

TIGHT = Budgets(device_bytes=340, host_bytes=10_000)


BLOCK = layer()
CODED = coded(BLOCK, spared=120)


def of_eight(known: LayerProfile) -> Profile:
    return profile_of(*[known] * 8, codec=None if known.coding is None else "int8")


def test_codes_hide_behind_compute_where_values_do_not() -> None:
    exact, plan = (plan_activations(of_eight(known), machine(), TIGHT) for known in (BLOCK, CODED))
    work_s = sum(known.forward_s + known.backward_s for known in [BLOCK] * 8)
    assert exact.step_s > work_s
    assert plan.step_s == pytest.approx(work_s)
    verify_by_simulation(plan)


def test_the_host_holds_codes() -> None:
    plan = LayerPlan(kept=0.0, host=1.0)
    assert plan.moved_bytes(BLOCK) == (160, 0)
    assert plan.moved_bytes(CODED) == (40, 0)
    assert dataclasses.replace(plan, kept=0.5, host=0.0, disk=0.5).moved_bytes(CODED) == (0, 20)


@pytest.mark.parametrize(("point", "moved"), [("all", 40), ("matmuls", 20 + 80), ("attention", 20)])
def test_what_a_recompute_reads_moves_whole(point: str, moved: float) -> None:
    assert LayerPlan(point=point, kept=0.0, host=1.0).moved_bytes(CODED) == (moved, 0)
    assert LayerPlan(point=point, kept=0.0, host=1.0).coding_s(CODED) == (0, 0)


def test_coding_takes_its_time_by_what_is_coded_and_counts_in_the_step() -> None:
    slow = coded(BLOCK, spared=120, encode_s=0.5, decode_s=0.25)
    assert LayerPlan(kept=0.0, host=1.0).coding_s(slow) == (0.5, 0.25)
    assert LayerPlan(kept=0.75, host=0.25).coding_s(slow) == (0.125, 0.0625)
    assert LayerPlan().coding_s(slow) == (0.0, 0.0)
    free, plan = (plan_activations(of_eight(known), machine(), TIGHT) for known in (CODED, slow))
    coding_s = sum(sum(own.coding_s(slow)) for own in plan.layers)
    assert coding_s > 0
    assert plan.stages[0].coding_s == pytest.approx(coding_s)
    assert plan.step_s > free.step_s
    verify_by_simulation(plan)


def test_a_codec_that_takes_longer_than_the_link_is_used_as_little_as_can_be() -> None:
    slow = coded(BLOCK, spared=120, encode_s=50.0, decode_s=50.0)
    plan = plan_activations(of_eight(slow), machine(), TIGHT)
    assert plan.stages[0].recompute_s > 0


def test_a_host_without_room_for_values_has_room_for_codes() -> None:
    tight = Budgets(device_bytes=400, host_bytes=7 * 41)
    unable = layer(matmuls=None, attention=None)
    with pytest.raises(Infeasible):
        plan_activations(of_eight(unable), machine(), tight)
    able = coded(unable, spared=120)
    plan = plan_activations(of_eight(able), machine(), tight)
    assert plan.stages[0].peak_host_bytes <= tight.host_bytes
    assert fits(plan.problem)


def test_the_checker_counts_codes() -> None:
    plan = plan_activations(of_eight(CODED), machine(), TIGHT)
    (stage,) = plan.stages
    wrong = dataclasses.replace(stage, peak_host_bytes=stage.peak_host_bytes * 4)
    violation = check_plan(dataclasses.replace(plan, stages=(wrong,)))
    assert violation is not None
    assert violation.rule is Rule.PREDICTION


def tried(seed: int) -> str:
    problem = with_codes(random_step(seed), seed)
    try:
        plan = solve_problem(problem)
    except Infeasible:
        return "infeasible"
    verify_by_simulation(plan)
    bound = relaxed_step_s(problem)
    assert problem.pipeline.stages > 1 or (bound is not None and bound <= plan.step_s * (1 + 1e-6))
    assert plan_from_json(plan_to_json(plan)) == plan
    return "planned" if plan.declined is None else "declined"


@pytest.mark.parametrize("first", range(0, 24, 12))
def test_plans_of_random_steps_with_a_codec_are_valid_and_keep_their_word(first: int) -> None:
    ends = collections.Counter(tried(seed) for seed in range(first, first + 12))
    assert ends["planned"] >= 4, ends


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 1000, 60))
def test_so_are_those_of_a_thousand(first: int) -> None:
    ends = collections.Counter(tried(seed) for seed in range(first, first + 60))
    assert ends["planned"] >= 24, ends


def test_a_file_without_a_codec_says_nothing_of_it_and_one_with_it_comes_back() -> None:
    exact, plan = (plan_activations(of_eight(known), machine(), TIGHT) for known in (BLOCK, CODED))
    text = plan_to_json(exact)
    assert not any(word in text for word in ("codec", "coding", "spared"))
    assert plan_from_json(text).problem.profile.codec is None
    again = plan_from_json(plan_to_json(plan))
    assert again == plan
    assert again.problem.profile.codec == "int8"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"codec": "int4"}, "the codec is 'int4', none of int8, fp8"),
        ({"codec": None}, "a layer class says what is coded, and the profile is of no codec"),
        ({"coding": {"spared_bytes": 161}}, "a codec spares 161 of 160 bytes"),
        ({"coding": {"spared_bytes": -1}}, "are no amounts"),
    ],
)
def test_what_cannot_be_spared_is_refused_in_a_line(edit: dict[str, object], words: str) -> None:
    root = json.loads(plan_to_json(plan_activations(of_eight(CODED), machine(), TIGHT)))
    profile = root["problem"]["profile"]
    if "codec" in edit:
        profile["codec"] = edit["codec"]
    if "coding" in edit:
        profile["classes"][0]["coding"] = edit["coding"]
    with pytest.raises(PlanError, match=words) as raised:
        plan_from_json(json.dumps(root))
    assert "\n" not in str(raised.value)
