"""Stages of several chunks: what the simulator plays turn by turn and what is predicted, on plans of any kind."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from activation_problems import MIB, layer, machine, profile_of, random_problem
from slow_tests import first

from memo.errors import Infeasible, PlanError
from memo.events import TierName
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    StageTurns,
    check_plan,
    plan_to_json,
    predict_stages,
    solve_problem,
)
from memo.mip.activation.checker import Rule
from memo.mip.activation.files import plan_from_json
from memo.mip.activation.simulator import simulate
from memo.mip.inputs import ALL, ATTENTION, MATMULS, EmbeddingOrHeadProfile, PipelineSchedule
from memo.mip.inputs.pipeline_schedules import rank_turns

TWO = [schedule for schedule in PipelineSchedule if schedule.default_chunks > 1]
CHUNKS = [(schedule, 2) for schedule in TWO]
CHUNKS += [(PipelineSchedule.INTERLEAVED, 3), (PipelineSchedule.ZERO_BUBBLE, 3), (PipelineSchedule.INTERLEAVED, 5)]
ENDLESS = 1 << 60


def any_plan(problem: ActivationProblem, seed: int) -> ActivationPlan:
    """What no planner would make: every layer otherwise."""
    draw = random.Random(seed)
    lasts = {problem.stages[stage].indices[-1] for stage in range(problem.pipeline.stages)}
    layers = []
    for index in range(len(problem.profile.layers)):
        point = draw.choice((ALL, MATMULS, ATTENTION))
        kept, host = (1.0, 0.0) if index in lasts else (share := draw.uniform(0, 1), draw.uniform(0, 1 - share))
        disk = 1 - kept - host
        layers.append(LayerPlan(point=point, kept=kept, host=host, disk=disk))
    budgets = Budgets(device_bytes=ENDLESS, host_bytes=ENDLESS, disk_bytes=ENDLESS)
    problem = dataclasses.replace(problem, budgets=budgets)
    return ActivationPlan(problem=problem, layers=tuple(layers), stages=predict_stages(problem, layers))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("schedule", "chunks"), CHUNKS)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (2, 6), (3, 6), (4, 8)])
@pytest.mark.parametrize("seeds", first([range(4), range(4, 8)], 1), ids=str)
def test_playing_every_turn_finds_what_is_predicted(
    schedule: PipelineSchedule, chunks: int, stages: int, microbatches: int, seeds: range
) -> None:
    pipeline = Pipeline(stages=stages, microbatches=microbatches, schedule=schedule, chunks=chunks)
    for seed in seeds:
        layers = chunks * stages + 3 * (seed % 4)
        problem = random_problem(seed, layers=layers, classes=1 + seed % 3, pipeline=pipeline)
        plan = any_plan(problem, seed)
        violation = check_plan(plan)
        assert violation is None, (seed, violation)
        for played, stage in zip(simulate(plan).stages, plan.stages, strict=True):
            assert played.peak(TierName.DEVICE).nbytes == pytest.approx(stage.peak_device_bytes, rel=1e-6)
            assert played.peak(TierName.HOST).nbytes == pytest.approx(
                stage.peak_host_bytes, rel=1e-6, abs=microbatches * layers
            )
        peak = max(range(stages), key=lambda stage: plan.stages[stage].peak_device_bytes)
        tight = dataclasses.replace(
            plan.problem,
            budgets=Budgets(
                device_bytes=plan.stages[peak].peak_device_bytes - 2, host_bytes=ENDLESS, disk_bytes=ENDLESS
            ),
        )
        violation = check_plan(dataclasses.replace(plan, problem=tight))
        assert violation is not None
        assert violation.rule is Rule.DEVICE


@pytest.mark.parametrize(("schedule", "chunks"), CHUNKS)
def test_heavy_ends_stand_beside_what_is_read_ahead(schedule: PipelineSchedule, chunks: int) -> None:
    """As much as ten layers, so that each end's passes are the fullest moments of its stage."""
    heavy = EmbeddingOrHeadProfile(forward_s=1.0, backward_s=2.0, saved_bytes=100 * MIB, transient_bytes=1000 * MIB)
    pipeline = Pipeline(stages=2, microbatches=4, schedule=schedule, chunks=chunks)
    for seed in range(4):
        problem = random_problem(seed, layers=2 * chunks + seed % 2, pipeline=pipeline)
        profile = dataclasses.replace(problem.profile, embedding=heavy, head=heavy)
        plan = any_plan(dataclasses.replace(problem, profile=profile), seed)
        assert check_plan(plan) is None, (seed, check_plan(plan))
        for played, stage in zip(simulate(plan).stages, plan.stages, strict=True):
            assert played.peak(TierName.DEVICE).nbytes == pytest.approx(stage.peak_device_bytes, rel=1e-6)


@pytest.mark.parametrize("schedule", TWO)
def test_a_chunks_last_layer_moves_unless_it_is_the_stages(schedule: PipelineSchedule) -> None:
    block = layer()
    problem = ActivationProblem(
        profile=profile_of(*[block] * 8),
        hardware=machine(),
        budgets=Budgets(device_bytes=ENDLESS, host_bytes=ENDLESS),
        pipeline=Pipeline(stages=2, microbatches=4, schedule=schedule),
    )
    first, last = problem.stages[0].indices[1], problem.stages[0].indices[-1]
    for moving, allowed in ((first, True), (last, False)):
        layers = tuple(LayerPlan(kept=0.5, host=0.5) if index == moving else LayerPlan() for index in range(8))
        plan = ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))
        violation = check_plan(plan)
        assert (violation is None) is allowed, violation
        assert violation is None or violation.rule is Rule.LAST


def test_between_the_halves_what_moved_is_gone_and_what_was_computed_again_is_there() -> None:
    """One layer a chunk, 160 bytes each, of which 60 are saved when it is computed again."""
    block = layer(always=60, all=100, matmuls=None, attention=1.0)
    turns = rank_turns(PipelineSchedule.ZERO_BUBBLE, ranks=2, rank=1, microbatches=2)
    said = " ".join(f"{turn.chunk}{turn.kind}{turn.microbatch}" for turn in turns)
    assert said == "0F0 0F1 1F0 1I0 1F1 1I1 1W0 0I0 1W1 0I1 0W0 0W1"
    pipeline = Pipeline(microbatches=2, own=StageTurns(layers=(1, 1), turns=turns))
    problem = ActivationProblem(
        profile=profile_of(block, block),
        hardware=machine(),
        budgets=Budgets(device_bytes=ENDLESS, host_bytes=ENDLESS),
        pipeline=pipeline,
    )

    def peak(first: LayerPlan, second: LayerPlan) -> int:
        (stage,) = predict_stages(problem, (first, second))
        return stage.peak_device_bytes

    everything = LayerPlan()
    again = LayerPlan(point=ATTENTION)
    away = LayerPlan(kept=0.0, host=1.0)
    assert peak(everything, everything) == 4 * 160
    # 1W0: one of the second chunk runs and one is between the halves, with all that was computed again; of the first chunk
    # two wait, as what they save.
    assert peak(again, again) == 2 * 160 + 2 * 60
    assert peak(away, everything) == 3 * 160
    # Where the second chunk saves little and nothing moves, only its halves count whole.
    assert peak(everything, again) == 4 * 160


@pytest.mark.parametrize("layers", [1, 2])
def test_the_layer_of_the_forward_before_leaves_beside_the_first_layer_of_the_next(layers: int) -> None:
    """160 bytes a layer, 60 of them saved: while the head runs, and the heavy layer after the first, 0F1 has left."""
    again = LayerPlan(point=ATTENTION)
    light = layer(always=60, all=100, matmuls=None, attention=1.0)
    heavy = dataclasses.replace(light, name="heavy", forward_transient_bytes=1000)
    turns = rank_turns(PipelineSchedule.INTERLEAVED, ranks=2, rank=1, microbatches=2)
    assert " ".join(f"{turn.chunk}{turn.kind}{turn.microbatch}" for turn in turns) == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"
    blocks = [light] * (2 * layers - 1) + [heavy if layers == 2 else light]
    problem = ActivationProblem(
        profile=profile_of(*blocks, head=EmbeddingOrHeadProfile(transient_bytes=2000 if layers == 1 else 0)),
        hardware=machine(),
        budgets=Budgets(device_bytes=ENDLESS),
        pipeline=Pipeline(microbatches=2, own=StageTurns(layers=(layers, layers), turns=turns)),
    )
    plans = tuple([again] * len(blocks))
    stages = predict_stages(problem, plans)
    plan = ActivationPlan(problem=problem, layers=plans, stages=stages)
    assert stages[0].peak_device_bytes == {1: 3 * 60 + 2000, 2: 5 * 60 + 160 + 1000}[layers]
    assert simulate(plan).stages[0].peak(TierName.DEVICE).nbytes == stages[0].peak_device_bytes
    assert check_plan(plan) is None


def test_counting_turn_by_turn_is_faster_than_by_the_larger_number() -> None:
    """Where backward is whole: of halves the larger number says nothing."""
    better = 0
    for rank, seed in itertools.product(range(2), range(6)):
        turns = rank_turns(PipelineSchedule.INTERLEAVED, ranks=2, rank=rank, microbatches=8)
        pipeline = Pipeline(microbatches=8, own=StageTurns(layers=(4, 4), turns=turns))
        problem = random_problem(seed, layers=8, pipeline=pipeline)
        held = max(max(counts) for counts in pipeline.peak_in_flight(0))
        counted = dataclasses.replace(problem, pipeline=Pipeline(microbatches=8, held=held))
        try:
            (before,), (after,) = solve_problem(counted).stages, solve_problem(problem).stages
        except Infeasible:
            continue
        added, added_before = after.recompute_s + after.stall_s, before.recompute_s + before.stall_s
        assert added <= added_before * (1 + 1e-6), seed
        better += added < 0.9 * added_before
    assert better >= 4


@pytest.mark.parametrize(("schedule", "chunks"), CHUNKS)
def test_a_plan_in_turns_comes_back_from_its_file(schedule: PipelineSchedule, chunks: int) -> None:
    pipeline = Pipeline(stages=2, microbatches=4, schedule=schedule, chunks=chunks)
    plan = any_plan(random_problem(1, layers=11, pipeline=pipeline), 1)
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    without = text.replace(f', "chunks": {chunks}, "layers": []}}', "}")
    assert without != text
    if chunks == 2:
        assert plan_from_json(without) == plan, "files from before there were numbers of chunks"
    else:
        with pytest.raises(PlanError, match="a stage has 2 chunks, and there are not as many predictions"):
            plan_from_json(without)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stages": 1}, "no meaning for one stage"),
        ({"stages": 2, "microbatches": 1}, "is too few for interleaved-1f1b"),
        ({"stages": 4, "microbatches": 9}, "does not divide into rounds"),
        ({"stages": 2, "microbatches": 1 << 18}, "too many to follow"),
        (
            {"stages": 2, "microbatches": 4, "chunks": 1},
            "1 chunks to a stage is too few for interleaved-1f1b; at least 2",
        ),
    ],
)
def test_a_step_that_a_schedule_cannot_run_is_refused(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Pipeline(schedule=PipelineSchedule.INTERLEAVED, **wrong)


def test_two_chunks_want_as_many_layers() -> None:
    with pytest.raises(PlanError, match="3 layers make no 2 stages of 2 chunks"):
        random_problem(
            1, layers=3, pipeline=Pipeline(stages=2, microbatches=4, schedule=PipelineSchedule.ZERO_BUBBLE_V)
        )
