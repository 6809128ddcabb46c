"""A plan is carried out within the very budgets that it was made for: never short of a page or a storage, never beyond."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path

import pytest
import torch
from slow_tests import first
from small_models import assert_equal, train

import memo
from memo.autoplan.actuator import late_bytes_of
from memo.errors import Infeasible
from memo.gpt import Precision, preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.gpt.model import GPT
from memo.manager.plan_source import checked_plan
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    extract_stage_plan,
    predict_stages,
    solve_problem,
)
from memo.mip.activation.plan import PAGE
from memo.mip.inputs import EmbeddingOrHeadProfile, PipelineSchedule, Profile, StaticBytes, hardware_preset
from memo.profiling.saved_storages import saved_storages
from memo.swap import find_layers
from memo.swap.disk import raw_file
from memo.swap.tiers import host_and_disk

# Slow enough beside its links that whatever finds room moves.
MACHINE = dataclasses.replace(
    hardware_preset("a800"),
    peak_flops=40e9,
    hbm_bytes_per_s=5e9,
    disk_write_bytes_per_s=2e9,
    disk_read_bytes_per_s=3e9,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small GPT, and a plan for it."""

    shape: dict[str, object]
    batch: int
    tokens: int
    plan: ActivationPlan

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(preset("tiny", **self.shape))  # type: ignore[arg-type]

    def loss(self, model: GPT, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(1, 96, (self.batch, self.tokens + 1), generator=generator)
        loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
        return loss


def test_copies_end_later_only_where_the_same_chunk_has_two_layers_more() -> None:
    machine = hardware_preset("h200")
    profile = derive_profile(preset("7b"), machine, StepLayout(tokens=1 << 15, gpus=4, pp=4), accumulate=8)
    schedule = PipelineSchedule.INTERLEAVED
    pipeline = Pipeline(stages=4, microbatches=8, stage_ranks=1, schedule=schedule, chunks=2)
    budgets = Budgets(device_bytes=int(0.95 * machine.device_bytes), host_bytes=1 << 41)
    problem = ActivationProblem(profile=profile, hardware=machine, budgets=budgets, pipeline=pipeline)
    plan = extract_stage_plan(solve_problem(problem), 0)
    (stage,) = plan.problem.stages
    assert len(stage.chunks) == 2
    late = late_bytes_of(plan)
    for chunk in stage.chunks:
        assert late[chunk.stop - 2 : chunk.stop] == [0, 0]
        assert min(late[chunk.start : chunk.stop - 2]) > 0


def random_case(seed: int) -> Case:
    """Budgets that something fits into, but not everything."""
    draw = random.Random(seed)
    batch, tokens = draw.choice([(1, 200), (2, 97), (3, 64)])
    shape: dict[str, object] = {
        "variant": "gpt",
        "layers": draw.randint(3, 7),
        "hidden": draw.choice([64, 96, 160]),
        "heads": 4,
        "vocab_size": 96,
        "max_seq": tokens,
        "positions": draw.choice(["learned", "rotary"]),
        "bias": draw.random() < 0.5,
    }
    profile = saved_alone(
        derive_profile(
            preset("tiny", **shape),  # type: ignore[arg-type]
            MACHINE,
            StepLayout(tokens=tokens, batch=batch),
            precision=Precision.FP32,
        )
    )
    while True:
        try:
            plan = checked_plan(random_problem(draw, profile))
        except Infeasible:
            continue
        return Case(shape=shape, batch=batch, tokens=tokens, plan=plan)


def saved_alone(profile: Profile) -> Profile:
    """What the engine counts: nothing but what the layers save."""
    (known,) = profile.classes
    bare = dataclasses.replace(known, static=StaticBytes(), forward_transient_bytes=0, backward_transient_bytes=0)
    return dataclasses.replace(
        profile, classes=(bare,), embedding=EmbeddingOrHeadProfile(), head=EmbeddingOrHeadProfile()
    )


def random_problem(draw: random.Random, profile: Profile) -> ActivationProblem:
    rate = draw.choice([1e9, 1e10])
    machine = dataclasses.replace(MACHINE, d2h_bytes_per_s=rate, h2d_bytes_per_s=rate)
    most = sum(layer.full_bytes for layer in profile.layer_profiles())
    overlap = draw.random() < 0.4
    budgets = Budgets(device_bytes=most)
    free = ActivationProblem(profile=profile, hardware=machine, budgets=budgets, overlap=overlap)
    (whole,) = predict_stages(free, [LayerPlan()] * len(profile.layers))
    least = (1 + overlap) * profile.classes[0].full_bytes
    device = least + int(draw.uniform(0, 0.7) * (whole.peak_device_bytes - least))
    host, disk = draw.choice([(1, 0), (1, 0), (1, 1)])
    budgets = Budgets(
        device_bytes=device,
        host_bytes=host * int(draw.uniform(0.05, 0.8) * most),
        disk_bytes=disk * int(draw.uniform(0.05, 0.5) * most),
    )
    return dataclasses.replace(free, budgets=budgets)


def test_a_derived_profile_knows_the_storages_that_autograd_saves() -> None:
    for seed in range(6):
        case = random_case(seed)
        (known,) = case.plan.problem.profile.classes
        model = case.model()
        found = saved_storages(functools.partial(case.loss, model, 0), find_layers(model))
        for sizes in list(found.values())[1:]:  # the first one's rotary tables are everyone's
            assert max(sizes) == known.largest_storage_bytes
            assert len(sizes) + 1 <= known.storages <= len(sizes) + 2, (
                "a recompute is given one or two products besides"
            )


@pytest.mark.parametrize("seed", first(range(16), 5))
def test_a_plan_holds_in_exactly_its_budgets(seed: int, tmp_path: Path) -> None:
    case = random_case(seed)
    budgets = case.plan.problem.budgets
    model, reference = case.model(), case.model()
    manager = memo.offload(
        model,
        plan=case.plan,
        host=budgets.host_bytes,
        disk=tmp_path if budgets.disk_bytes else [],
        disk_budget=budgets.disk_bytes or None,
        min_bytes=0,
    )
    got = train(model, lambda step: case.loss(model, step), manager)
    assert_equal(got, train(reference, lambda step: case.loss(reference, step)))
    stats = manager.stats
    assert stats.peak_device_bytes <= case.plan.stages[0].peak_device_bytes
    assert bool(stats.bytes_host) == any(layer.host for layer in case.plan.layers)
    manager.close()


def test_places_in_tiers_are_multiples_of_the_planners_page() -> None:
    assert PAGE == host_and_disk.PAGE == raw_file.BLOCK_ALIGN
