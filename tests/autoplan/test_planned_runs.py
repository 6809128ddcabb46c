"""Runs by a plan, made at run time or given: gradients equal in every phase, budgets kept, the plan carried out."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offload_models import gpt, token_ids
from race_checker import CheckingBackend, CheckingDisk
from small_models import assert_equal, ids, stack, train
from throttled_backend import PacedBackend

import memo
from memo.autoplan import Actuator, AutoPlan, DeviceBudget, settings_of
from memo.errors import PlanError, UsageError
from memo.gpt import preset
from memo.gpt.model import GPT
from memo.kernels import Codec
from memo.manager import Manager
from memo.manager.plan_source import checked_plan, own_part
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    StageTurns,
    extract_stage_plan,
    plan_to_json,
    predict_stages,
)
from memo.mip.inputs import (
    ALL,
    ATTENTION,
    INPUT,
    MATMULS,
    PRESETS,
    LayerProfile,
    PipelineSchedule,
    PointProfile,
    Profile,
    Role,
    Signature,
)
from memo.mip.inputs.pipeline_schedules import rank_turns
from memo.parallel import PipelineOrder
from memo.swap import Engine, LayerCosts, Level, Mix, Placement, PointCost, RecomputePolicy, WhenFull, find_layers
from memo.swap.memory.page_aligned import PAGE_BYTES
from memo.swap.tiers import DiskTier, HostTier

ROOM = 1 << 28
ROOMY = DeviceBudget(total_bytes=ROOM, peak_bytes=lambda: 0, restart=lambda: None)
FIXED = LayerPlan(point=MATMULS, kept=0.5, host=0.5)


def checked_manager(model: torch.nn.Module, *, policy: Any = "lazy") -> tuple[Manager, Engine, RecomputePolicy]:
    backend = CheckingBackend(policy, seed=1)
    tiers = [HostTier(backend, ROOM, segment_bytes=1 << 20), DiskTier(CheckingDisk(backend, ROOM), ROOM)]
    engine = Engine(backend, tiers, min_bytes=1024)
    recompute_policy = RecomputePolicy(engine, Level.SAVE_ALL)
    return Manager(model, find_layers(model), engine, recompute_policy=recompute_policy), engine, recompute_policy


def paced_manager(
    model: torch.nn.Module, *, host: int = ROOM, codec: Codec | None = None
) -> tuple[Manager, Engine, RecomputePolicy]:
    """In real time, over a link of 20 MB/s, as a run that makes its plans itself."""
    backend = PacedBackend(d2h_bytes_per_s=20e6, h2d_bytes_per_s=20e6)
    tiers = [HostTier(backend, host, segment_bytes=1 << 20)]
    engine = Engine(backend, tiers, min_bytes=1024, codec=codec, when_full=WhenFull.STAY)
    recompute_policy = RecomputePolicy(engine, Level.SAVE_ALL)
    return Manager(model, find_layers(model), engine, recompute_policy=recompute_policy), engine, recompute_policy


def forward(model: torch.nn.Module, step: int) -> torch.Tensor:
    tokens = token_ids(step, 2)
    loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def fresh(layers: int = 6) -> torch.nn.Module:
    torch.manual_seed(0)
    return gpt("gpt", layers=layers)


@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_kept_tokens_of_divided_tensors_stay_and_the_rest_of_them_goes(policy: str) -> None:
    """Kept by half at mixed levels: the sources go, what is kept of them is on the device, and gradients are equal."""
    model = fresh(4)
    manager, engine, _ = checked_manager(model, policy=policy)
    manager.choose_levels(dict.fromkeys(range(4), (0.25, 0.5, 0.25)))
    engine.place({n: Placement(kept=0.5, host=0.5) for n in range(4)})
    got = train(model, lambda step: forward(model, step), manager)
    reference = fresh(4)
    assert_equal(got, train(reference, lambda step: forward(reference, step)))
    gc.collect()
    assert engine.backend.races == []  # type: ignore[attr-defined]
    assert engine.stats.bytes_kept > 0
    assert engine.stats.bytes_host > 0
    assert (engine.stats.live_entries, engine.stats.device_bytes) == (0, 0)
    manager.close()


def test_keeping_a_part_takes_less_than_keeping_all() -> None:
    def peak(levels: tuple[float, float, float]) -> int:
        model = fresh(8)
        manager, engine, _ = checked_manager(model, policy="eager")
        manager.choose_levels(dict.fromkeys(range(8), levels))
        engine.place({n: Placement(kept=1.0) for n in range(8)})
        train(model, lambda step: forward(model, step), manager, steps=2)
        manager.close()
        assert engine.stats.bytes_host == 0
        return engine.stats.peak_device_bytes

    assert peak((0.0, 0.0, 1.0)) < 0.6 * peak((1.0, 0.0, 0.0))


@pytest.mark.filterwarnings("ignore:no plan")
def test_a_run_that_drops_layers_at_random_makes_no_plan_of_a_part_of_them(tmp_path: Path) -> None:
    def run(**options: Any) -> tuple[list[Any], memo.Manager | None]:
        model = stack()
        layers = [*model.layers]
        manager = memo.offload(model, min_bytes=512, disk=tmp_path, **options) if options else None

        def step(number: int) -> torch.Tensor:
            x = model.embed(ids(number))
            for layer in layers[number % 2 :]:  # one is missing in the step that is measured
                x = layer(x)
            return x.square().mean()

        return train(model, step, manager, steps=6), manager

    got, manager = run(host=ROOM)
    assert_equal(got, run()[0])
    assert manager is not None
    assert manager.plan is None
    assert "some layers did not run" in str(manager.report())
    manager.close()


def test_a_run_that_plans_itself_is_equal_in_every_phase_and_stays_in_its_budget() -> None:
    model, reference = fresh(8), fresh(8)
    manager, engine, recompute_policy = paced_manager(model)
    whole = _whole_bytes()
    memory = DeviceBudget(total_bytes=int(5 * whole), peak_bytes=lambda: 0, restart=lambda: None)
    actuator = Actuator(engine, recompute_policy, manager.layers, memory, tracer=None)
    planning = AutoPlan(actuator, checked_plan)
    manager.plan_with(planning)
    phases = []
    for step in range(13):
        assert_equal(
            train(model, lambda _, n=step: forward(model, n), manager, steps=1),  # type: ignore[misc]
            train(reference, lambda _, n=step: forward(reference, n), steps=1),  # type: ignore[misc]
        )
        phases.append(planning.outcome().phase)
    assert [name for name, _ in itertools.groupby(phases)][:3] == ["warm up", "profiling", "planned"]
    plan = manager.plan
    assert plan is not None
    assert plan.declined is None
    assert plan.stages[0].peak_device_bytes <= memory.total_bytes
    engine.stats.restart_peak()
    train(model, lambda step: forward(model, step), manager, steps=1)
    assert engine.stats.restart_peak() <= 1.1 * memory.total_bytes, (
        "whole storages are kept where fractions were planned"
    )
    assert "time: forward and backward" in str(manager.report())
    manager.close()


def test_a_run_with_a_codec_plans_with_codes() -> None:
    model = fresh(8)
    manager, engine, recompute_policy = paced_manager(model, codec=Codec.FP8)
    memory = DeviceBudget(total_bytes=int(6 * _whole_bytes()), peak_bytes=lambda: 0, restart=lambda: None)
    manager.plan_with(AutoPlan(Actuator(engine, recompute_policy, manager.layers, memory, tracer=None), checked_plan))
    train(model, lambda step: forward(model, step), manager, steps=6)
    plan = manager.plan
    assert plan is not None
    profile = plan.problem.profile
    assert profile.codec == "fp8"
    saved = sum(layer.full_bytes for layer in profile.layer_profiles())
    spared = sum(layer.coding.spared_bytes for layer in profile.layer_profiles() if layer.coding is not None)
    assert 0.6 * saved < spared < 0.75 * saved, "nearly all is float32"
    assert engine.stats.peak_device_bytes <= 1.1 * memory.total_bytes
    manager.close()


def test_a_program_that_restarts_the_peaks_of_memory_hides_nothing_from_the_plan() -> None:
    """Training loops log the peak after each step and start it anew."""
    model = fresh(4)
    manager, engine, recompute_policy = checked_manager(model, policy="eager")
    peak = 0
    memory = DeviceBudget(total_bytes=ROOM, peak_bytes=lambda: peak, restart=lambda: None)
    actuator = Actuator(engine, recompute_policy, manager.layers, memory, tracer=None)
    with manager:
        loss = forward(model, 0)
    peak = ROOM // 2  # in backward
    loss.backward()
    peak = 0  # by the program
    saved = actuator.take_peak()
    assert saved > 0
    assert actuator.limits().others_bytes == ROOM // 2 - saved
    assert actuator.limits().device_bytes == ROOM // 2 + saved
    manager.close()


def test_torchs_peaks_are_left_alone_once_a_plan_is_settled() -> None:
    model = fresh(4)
    manager, engine, recompute_policy = paced_manager(model)
    restarts = itertools.count()
    memory = DeviceBudget(total_bytes=ROOM, peak_bytes=lambda: 0, restart=lambda: next(restarts) and None)
    planning = AutoPlan(Actuator(engine, recompute_policy, manager.layers, memory, tracer=None), checked_plan)
    manager.plan_with(planning)
    train(model, lambda step: forward(model, step), manager, steps=5)
    assert planning.outcome().phase == "settled"
    before = next(restarts)
    train(model, lambda step: forward(model, step), manager, steps=2)
    assert next(restarts) == before + 1
    assert before > 5 * 4, "while it was being measured each layer had a peak of its own"
    manager.close()


def test_ever_new_lengths_are_equal_planned_and_within_the_budget() -> None:
    """The longest of them, too, which come when shorter ones have been measured."""
    model, reference = fresh(8), fresh(8)
    manager, engine, recompute_policy = paced_manager(model)
    memory = DeviceBudget(total_bytes=int(5 * _whole_bytes()), peak_bytes=lambda: 0, restart=lambda: None)
    planning = AutoPlan(Actuator(engine, recompute_policy, manager.layers, memory, tracer=None), checked_plan)
    manager.plan_with(planning)

    def cut(module: torch.nn.Module, step: int) -> torch.Tensor:
        tokens = token_ids(step, 2)[:, : 25 + 7 * step % 40]
        loss: torch.Tensor = module(tokens[:, :-1], tokens[:, 1:])
        return loss

    steps = 14
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = train(model, lambda step: cut(model, step), manager, steps=steps)
    assert_equal(got, train(reference, lambda step: cut(reference, step), steps=steps))
    assert manager.plan is not None, planning.outcome().why_not
    assert 2 <= planning.outcome().plans < steps - 3
    over = engine.stats.peak_device_bytes > memory.total_bytes
    assert over == any("more device memory than its budget" in str(one.message) for one in told), "never without a word"
    assert engine.stats.peak_device_bytes <= 1.1 * memory.total_bytes, (
        "whole storages are kept where fractions were planned"
    )
    manager.close()


@pytest.mark.filterwarnings("ignore:the plan for")
def test_microbatches_one_after_the_other_are_planned_as_one_in_flight() -> None:
    """Each backward runs before the next forward: what all of them save together never lies on the device."""
    model = fresh(8)
    manager, engine, recompute_policy = paced_manager(model)
    memory = DeviceBudget(total_bytes=int(5 * _whole_bytes()), peak_bytes=lambda: 0, restart=lambda: None)
    manager.plan_with(AutoPlan(Actuator(engine, recompute_policy, manager.layers, memory, tracer=None), checked_plan))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        for _ in range(3):
            with manager:
                loss = forward(model, step)
            (loss / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert manager.plan is not None
    assert manager.plan.problem.pipeline == Pipeline(microbatches=1, held=1)
    manager.close()


@pytest.mark.filterwarnings("ignore:no room for:RuntimeWarning")  # in the first step, of which half is left free
@pytest.mark.parametrize(("device", "host"), [(4.0, 0.05), (2.9, 0.15), (2.3, 1.5)])
def test_a_run_measures_itself_wherever_a_plan_has_room(device: float, host: float) -> None:
    """Attention's results and inputs are an eighth of each of eight layers: the first two hosts have no room for them."""
    model, reference = fresh(8), fresh(8)
    whole = 2 * _whole_bytes()
    manager, engine, recompute_policy = paced_manager(model, host=int(host * whole))
    memory = DeviceBudget(total_bytes=int(device * whole), peak_bytes=lambda: 0, restart=lambda: None)
    planning = AutoPlan(Actuator(engine, recompute_policy, manager.layers, memory, tracer=None), checked_plan)
    manager.plan_with(planning)
    for step in range(7):
        assert_equal(
            train(model, lambda _, n=step: forward(model, n), manager, steps=1),  # type: ignore[misc]
            train(reference, lambda _, n=step: forward(reference, n), steps=1),  # type: ignore[misc]
        )
    assert manager.plan is not None, planning.outcome().why_not
    assert manager.plan.declined is None
    points = manager.plan.problem.profile.classes[0].points
    assert {ALL, ATTENTION, INPUT} <= {point.name for point in points}
    assert all(point.recompute_s for point in points[1:]), "all were timed"
    assert engine.tiers[0].peak <= host * whole
    manager.close()


@pytest.mark.parametrize(
    ("point", "setting"),
    [
        (ALL, Level.SAVE_ALL),
        (MATMULS, Level.SAVE_MATMULS),
        (ATTENTION, Level.SAVE_ATTENTION),
        (INPUT, Level.SAVE_INPUT),
        ("p3", Mix(points={"p3": 1.0})),
    ],
)
def test_a_point_of_a_plan_is_its_level_or_has_its_name(point: str, setting: object) -> None:
    known = LayerProfile(
        name="layer",
        always_bytes=10,
        points=tuple(
            PointProfile(name=name, saved_bytes=1000 - 200 * number)
            for number, name in enumerate((ALL, MATMULS, ATTENTION, "p3", INPUT))
        ),
        forward_s=1.0,
        backward_s=2.0,
    )
    plan = given_plan(3)
    profile = dataclasses.replace(plan.problem.profile, classes=(known,), layers=("layer",) * 3)
    parts = (LayerPlan(point=point),) * 2 + (LayerPlan(),)
    plan = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, profile=profile), layers=parts)
    placements, settings = settings_of(plan, find_layers(stack(layers=3)))
    assert list(settings.values()) == [setting, setting, Level.SAVE_ALL]
    assert placements[0].nbytes == int(parts[0].saved_bytes(known))


def test_host_memory_is_prepared_for_all_that_the_device_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, engine, recompute_policy = paced_manager(fresh(3))
    memory = DeviceBudget(total_bytes=150_000, peak_bytes=lambda: 0, restart=lambda: None)
    actuator = Actuator(engine, recompute_policy, manager.layers, memory, tracer=None)
    expected: list[int] = []
    monkeypatch.setattr(engine.tiers[0], "expect", expected.append)

    def prepare(*saved: int) -> None:
        costs = {
            str(number): LayerCosts(
                layer=str(number),
                tokens=100,
                points=(PointCost(name=ALL, saved_bytes=nbytes),),
            )
            for number, nbytes in enumerate(saved)
        }
        monkeypatch.setattr(actuator, "costs", lambda: costs)
        actuator.prepare_host()

    prepare(60_000, 60_000, 50_000)  # two of the largest layers come and go, which leaves room for 30,000
    prepare(80_000, 70_000)  # and here for nothing
    prepare(50_000)
    prepare(ROOM, ROOM)
    assert expected == [140_000, 150_000, ROOM]
    manager.close()


@pytest.mark.parametrize(("point", "kept"), [(ALL, 0.5), (MATMULS, 0.0), (ATTENTION, 0.25), (INPUT, 0.0)])
def test_a_run_finds_room_for_all_storages_of_a_plan_that_the_host_has_addresses_for(point: str, kept: float) -> None:
    part = LayerPlan(point=point, kept=kept, host=1 - kept)
    plan = dataclasses.replace(given_plan(4), layers=(part, part, part, LayerPlan()))

    def excess_and_lacking(host: int) -> tuple[int, int]:
        """Bytes that the plan lacks by its proof, and that a run by it lacked."""
        model = fresh(4)
        manager, engine, recompute_policy = paced_manager(model, host=host)
        actuator = Actuator(engine, recompute_policy, manager.layers, ROOMY, tracer=None)
        actuator.apply(Level.SAVE_ATTENTION)
        train(model, lambda step: forward(model, step), manager, steps=1)
        excess = actuator.host_excess(plan)
        actuator.apply(plan)
        actuator.take_lacking()
        train(model, lambda step: forward(model, step), manager, steps=2)
        manager.close()
        return excess, actuator.take_lacking()[0]

    excess, lacking = excess_and_lacking(PAGE_BYTES)
    assert excess > 0 < lacking
    need = PAGE_BYTES + excess
    assert excess_and_lacking(need) == (0, 0)
    assert excess_and_lacking(need - PAGE_BYTES)[0] == PAGE_BYTES


def _whole_bytes() -> int:
    """What one layer saves."""
    model = fresh(2)
    manager, engine, _ = checked_manager(model, policy="eager")
    with manager:
        loss = forward(model, 0)
    nbytes = engine.stats.device_bytes
    loss.backward()
    manager.close()
    return nbytes // 2


def test_a_model_that_fits_is_left_alone_after_three_steps(tmp_path: Path) -> None:
    model, reference = stack(layers=4), stack(layers=4)
    manager = memo.offload(model, disk=tmp_path, min_bytes=512)
    got = train(model, lambda step: model(ids(step)), manager, steps=6)
    assert_equal(got, train(reference, lambda step: reference(ids(step)), steps=6))
    assert manager.plan is not None
    assert manager.plan.declined is not None
    before = manager.stats.bytes_disk
    train(model, lambda step: model(ids(step)), manager, steps=2)
    assert manager.stats.bytes_disk == before
    assert "plan: nothing to move: " in str(manager.report())
    manager.close()


def test_a_model_too_small_to_move_anything_is_left_alone_without_a_warning() -> None:
    model, reference = stack(layers=4), stack(layers=4)
    manager = memo.offload(model)
    got = train(model, lambda step: model(ids(step)), manager, steps=4)
    assert_equal(got, train(reference, lambda step: reference(ids(step)), steps=4))
    report = manager.report()
    assert report.plan is not None
    assert report.plan.phase == "settled"
    assert "plan: none: no layer saved a tensor of min_bytes or more: there is nothing to move" in str(report)
    assert manager.stats.bytes_recomputed == 0
    manager.close()


def given_plan(layers: int) -> ActivationPlan:
    """A plan for a machine with all the room there is, for layers that nobody measured."""
    known = LayerProfile(
        name="any",
        always_bytes=500,
        points=(
            PointProfile(name=ALL, saved_bytes=4500),
            PointProfile(name=MATMULS, saved_bytes=2500, recompute_s=0.1),
            PointProfile(name=ATTENTION, saved_bytes=500, recompute_s=0.3),
            PointProfile(name=INPUT, saved_bytes=0, recompute_s=0.5),
        ),
        forward_s=1.0,
        backward_s=2.0,
    )
    problem = ActivationProblem(
        profile=Profile(
            signature=Signature(model="any", batch=2, tokens=32, dtype="float32"),
            role=Role.DERIVED,
            classes=(known,),
            layers=("any",) * layers,
        ),
        hardware=PRESETS["h100"],
        budgets=Budgets(device_bytes=1 << 40, host_bytes=1 << 40),
    )
    parts = (*(FIXED for _ in range(layers - 1)), LayerPlan())
    return ActivationPlan(problem=problem, layers=parts, stages=predict_stages(problem, parts))


@pytest.mark.parametrize("as_file", [False, True])
def test_a_given_plan_is_carried_out(as_file: bool, tmp_path: Path) -> None:
    plan: Any = given_plan(6)
    if as_file:
        path = tmp_path / "plan.json"
        path.write_text(plan_to_json(plan))
        plan = path
    model, reference = fresh(6), fresh(6)
    manager = memo.offload(model, plan=plan, host="256MiB", disk=[], min_bytes=1024)
    got = train(model, lambda step: forward(model, step), manager)
    assert_equal(got, train(reference, lambda step: forward(reference, step)))
    stats = manager.stats
    assert manager.plan == given_plan(6)
    assert min(stats.bytes_kept, stats.bytes_host, stats.bytes_recomputed) > 0
    manager.close()


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan is for 5 layers; the model has 6"):
        memo.offload(fresh(6), plan=given_plan(5), host="256MiB")


def order(*own: int, stages: int = 2, held: int = 2) -> PipelineOrder:
    return PipelineOrder(stages=stages, own=own, held=held, weight=held, backward=())


def test_of_a_pipelines_plan_a_rank_carries_out_the_stage_that_its_schedule_gives_it() -> None:
    alone = given_plan(6)
    assert own_part(alone, None) is own_part(alone, order(0)) is alone
    problem = dataclasses.replace(alone.problem, pipeline=Pipeline(stages=2, microbatches=4))
    layers = (FIXED, FIXED, LayerPlan()) * 2
    plan = dataclasses.replace(alone, problem=problem, layers=layers, stages=predict_stages(problem, layers))
    assert own_part(plan, order(1, held=1)) == extract_stage_plan(plan, 1)
    for there, words in (
        (None, "for 2 pipeline stages; give the schedule"),
        (order(0, 2, stages=4), "for 2 pipeline stages, and the schedule has 4"),
        (order(1, held=4), "for 1 microbatches in flight on stage 1, and the schedule holds 4"),
    ):
        with pytest.raises(PlanError, match=words):
            own_part(plan, there)


def test_of_a_plan_in_turns_a_rank_carries_out_both_of_its_stages() -> None:
    alone = given_plan(6)
    profile = dataclasses.replace(alone.problem.profile, layers=alone.problem.profile.layers[:1] * 8)
    pipeline = Pipeline(stages=2, microbatches=4, schedule=PipelineSchedule.INTERLEAVED)
    problem = dataclasses.replace(alone.problem, profile=profile, pipeline=pipeline)
    layers = (*(FIXED,) * 5, LayerPlan(), FIXED, LayerPlan())
    plan = dataclasses.replace(alone, problem=problem, layers=layers, stages=predict_stages(problem, layers))

    def told(
        *own: int, layers: tuple[int, int] = (2, 2), schedule: PipelineSchedule = pipeline.schedule
    ) -> PipelineOrder:
        turns = rank_turns(schedule, ranks=2, rank=own[0], microbatches=4)
        known = StageTurns(layers=layers, turns=turns)
        return dataclasses.replace(order(*own, stages=4), turns=known)

    part = own_part(plan, told(0, 2))
    assert part == extract_stage_plan(plan, 0)
    assert part.layers == (FIXED, FIXED, FIXED, LayerPlan())
    named: Any = [SimpleNamespace(name=str(number)) for number in range(4)]
    assert [place.begins for place in settings_of(part, named)[0].values()] == [True, False, True, False]
    for there, words in (
        (told(0, 3, schedule=PipelineSchedule.ZERO_BUBBLE_V), r"gives no rank stages \(0, 3\)"),
        (told(1, 3, layers=(1, 3)), r"of rank 1 have \(2, 2\) layers there, and others in the model"),
        (told(0, 2, schedule=PipelineSchedule.ZERO_BUBBLE), "holds other ones at a time"),
    ):
        with pytest.raises(PlanError, match=words):
            own_part(plan, there)


def test_a_plan_is_for_the_tiles_in_which_the_model_computes_its_mlps() -> None:
    plan = given_plan(6)
    profile = dataclasses.replace(plan.problem.profile, mlp_tiles=4)
    tiled = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, profile=profile))
    with pytest.raises(
        PlanError, match="MLPs in 4 tiles, and the model computes them in 1; give the model mlp_tiles=4"
    ):
        memo.offload(fresh(6), plan=tiled, host="256MiB")  # a model that knows no tiles
    ours = GPT(preset("tiny", layers=6, mlp_tiles=4))
    memo.offload(ours, plan=tiled, host="256MiB").close()
    with pytest.raises(PlanError, match="MLPs in 1 tiles"):
        memo.offload(ours, plan=plan, host="256MiB")


def test_a_plan_and_an_alpha_say_the_same_thing_twice() -> None:
    with pytest.raises(UsageError, match="give one of the three"):
        memo.offload(fresh(6), plan=given_plan(6), alpha=0.5, host="256MiB")


def test_a_plan_that_needs_a_tier_which_is_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="host, which is off"):
        memo.offload(fresh(6), plan=given_plan(6), disk=tmp_path)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": "something else"}')
    with pytest.raises(PlanError):
        memo.offload(fresh(6), plan=path, host="256MiB")
