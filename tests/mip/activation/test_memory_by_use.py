"""A GPU's memory by use adds up to the predicted peak, to the byte, for every named model and many layouts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from memo.gpt import PRESETS, Precision, preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    DoesNotFit,
    LayerPlan,
    MemoryUse,
    Pipeline,
    highest_memory,
    room_in_forward,
    solve_problem,
    stage_memory,
)
from memo.mip.inputs import hardware_preset

H200 = hardware_preset("h200")
LAYOUTS = (
    {"gpus": 1},
    {"gpus": 8},
    {"gpus": 8, "tp": 8},
    {"gpus": 16, "cp": 2, "tp": 4},
    {"gpus": 64, "tp": 8, "pp": 4},
)


def problem(
    name: str, layout: dict[str, int], *, tokens: int, precision: Precision = Precision.BF16
) -> ActivationProblem:
    where = StepLayout(tokens=tokens, batch=1, **layout)
    microbatches = 8 if where.pp > 1 else 1
    profile = derive_profile(preset(name), H200, where, precision=precision, accumulate=microbatches, name=name)
    budgets = Budgets(
        device_bytes=int(0.95 * H200.device_bytes), host_bytes=1 << 41, disk_bytes=0, ranks_per_node=min(where.gpus, 8)
    )
    pipeline = Pipeline(stages=where.pp, microbatches=microbatches, stage_ranks=where.gpus // where.pp)
    return ActivationProblem(profile=profile, hardware=H200, budgets=budgets, pipeline=pipeline)


def plan_or_misfit(asked: ActivationProblem) -> ActivationPlan | DoesNotFit:
    try:
        return solve_problem(asked)
    except DoesNotFit as error:
        return error


def divides(layout: dict[str, int], name: str) -> bool:
    config, tp = PRESETS[name], layout.get("tp", 1)
    return not (config.heads % tp or config.kv_heads % tp or config.ffn % tp)


@pytest.mark.covering(1, apart=True)
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in PRESETS if PRESETS[name].moe is None for layout in LAYOUTS if divides(layout, name)],
    ids=str,
)
def test_uses_add_up_to_the_peak_whether_a_plan_fits_or_not(name: str, layout: dict[str, int]) -> None:
    asked = problem(name, layout, tokens=1 << 16)
    plan = plan_or_misfit(asked)
    if isinstance(plan, DoesNotFit):
        assert plan.memory.nbytes == sum(plan.memory.uses.values()) > asked.budgets.device_bytes
        # What is named as enough has room besides for storages that go to one place whole.
        assert plan.memory.nbytes <= plan.least_bytes["device"] <= 1.01 * plan.memory.nbytes
        return
    peaks = [stage.peak_device_bytes for stage in plan.stages]
    found = [stage_memory(asked.stages[stage], plan.layers) for stage in range(asked.pipeline.stages)]
    assert [sum(memory.uses.values()) for memory in found] == peaks
    highest = highest_memory(asked, plan.layers)
    assert highest.nbytes == max(peaks)
    assert all(nbytes > 0 for memory in found for nbytes in memory.uses.values())


def test_every_state_of_training_is_told_apart() -> None:
    asked = problem("7b", {"gpus": 1}, tokens=1 << 12, precision=Precision.BF16_AUTOCAST)
    uses = highest_memory(asked, solve_problem(asked).layers).uses
    static = [layer.static for layer in asked.profile.layer_profiles()]
    static += [asked.profile.embedding.static, asked.profile.head.static]
    for use, field in (
        (MemoryUse.WEIGHTS, "weights"),
        (MemoryUse.GRADIENTS, "gradients"),
        (MemoryUse.OPTIMIZER, "optimizer"),
        (MemoryUse.CAST, "cast"),
    ):
        assert uses[use] == sum(getattr(part, field) for part in static) > 0
    assert uses[MemoryUse.OPTIMIZER] == 2 * uses[MemoryUse.WEIGHTS]
    assert MemoryUse.OTHER not in uses


def test_the_table_of_a_pipeline_is_of_its_fullest_stage() -> None:
    asked = problem("7b", {"gpus": 64, "tp": 8, "pp": 4}, tokens=1 << 18)
    plan = solve_problem(asked)
    memory = highest_memory(asked, plan.layers)
    peaks = [stage.peak_device_bytes for stage in plan.stages]
    assert memory.stage == peaks.index(max(peaks))
    smaller = dataclasses.replace(asked, budgets=dataclasses.replace(asked.budgets, device_bytes=memory.static_bytes))
    with pytest.raises(DoesNotFit) as raised:
        solve_problem(smaller)
    assert raised.value.memory.static_bytes <= memory.nbytes


@pytest.mark.parametrize("layout", LAYOUTS[:1] + LAYOUTS[3:])
def test_room_in_forward_becomes_less_by_what_a_layer_keeps(layout: dict[str, int]) -> None:
    asked = problem("7b", layout, tokens=1 << 17)
    plans = [LayerPlan(kept=0.25, host=0.75)] * len(asked.profile.layers)
    room = room_in_forward(asked, plans)
    kept = 0.25 * asked.profile.layer_profiles()[0].full_bytes
    for stage in asked.stages:
        own = [room[index] for index in stage.indices]
        assert max(own) < stage_memory(stage, plans).nbytes
        for before, after in itertools.pairwise(own[1:]):  # the first layer has none before it
            assert before - after == pytest.approx(kept, abs=2)
    assert all(nbytes >= 0 for nbytes in room)
