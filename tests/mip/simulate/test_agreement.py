"""Plan and simulation, which share no code, agree: on random problems and on a grid of models, lengths and machines."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from activation_problems import plan_activations, random_problem

from memo.errors import Infeasible, PlanInvalid
from memo.events import TierName
from memo.gpt import preset
from memo.gpt.arithmetic import StepLayout, TrainingMethod, derive_profile
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    predict_stages,
    solve_problem,
)
from memo.mip.activation.proof import AGREEMENT_IN_TURNS
from memo.mip.activation.simulator import require_within_budgets, simulate
from memo.mip.inputs import (
    ALL,
    ATTENTION,
    EmbeddingOrHeadProfile,
    LayerProfile,
    PipelineSchedule,
    StaticBytes,
    hardware_preset,
)
from memo.mip.simulate import Simulation
from memo.units import format_bytes

GIB, TIB = 1 << 30, 1 << 40
AGREEMENT = 0.02
SCALE = 1 << 20
"""Random problems have layers of some hundred bytes, where rounding to whole bytes would count."""


def assert_agreement(plan: ActivationPlan, simulation: Simulation, within: float = AGREEMENT) -> None:
    assert simulation.step_s == pytest.approx(plan.step_s, rel=within)
    require_within_budgets(simulation)
    for stage, predicted in zip(simulation.stages, plan.stages, strict=True):
        for tier, nbytes in (
            (TierName.DEVICE, predicted.peak_device_bytes),
            (TierName.HOST, predicted.peak_host_bytes),
            (TierName.DISK, predicted.peak_disk_bytes),
        ):
            assert stage.peak(tier).nbytes <= nbytes + 4 * len(plan.layers)


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(),
        Pipeline(microbatches=3),
        Pipeline(stages=2, microbatches=5),
        Pipeline(stages=3, microbatches=2),
        Pipeline(stages=2, microbatches=3, schedule=PipelineSchedule.GPIPE),
    ],
    ids=lambda one: f"{one.stages}x{one.microbatches} {one.schedule}",
)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "compute waits"])
def test_random_problems(pipeline: Pipeline, overlap: bool) -> None:
    planned, moved, recomputed = 0, 0, 0
    for seed in range(40):
        problem = scaled(random_problem(seed, layers=3 + seed % 14, classes=1 + seed % 3, pipeline=pipeline))
        problem = dataclasses.replace(problem, overlap=overlap)
        try:
            plan = solve_problem(problem)
        except Infeasible:
            continue
        simulation = simulate(plan)
        assert_agreement(plan, simulation)
        planned += plan.declined is None
        moved += any(stage.copies for stage in simulation.stages)
        recomputed += any(stage.recompute_s for stage in simulation.stages)
    assert min(planned, moved, recomputed) >= 5  # else nothing was tested


@pytest.mark.covering(1, apart=True)
@pytest.mark.parametrize(
    "schedule", [PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE, PipelineSchedule.ZERO_BUBBLE_V]
)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 6)])
def test_random_problems_in_turns(schedule: PipelineSchedule, stages: int, microbatches: int) -> None:
    """Budgets are kept to the byte; what turns wait for is predicted by its mean."""
    pipeline = Pipeline(stages=stages, microbatches=microbatches, schedule=schedule)
    planned, moved, recomputed = 0, 0, 0
    for seed in range(12):
        problem = scaled(random_problem(seed, layers=2 * stages + seed % 9, classes=1 + seed % 3, pipeline=pipeline))
        try:
            plan = solve_problem(problem)
        except Infeasible:
            continue
        simulation = simulate(plan)
        assert_agreement(plan, simulation, within=AGREEMENT_IN_TURNS)
        planned += plan.declined is None
        moved += any(stage.copies for stage in simulation.stages)
        recomputed += any(stage.recompute_s for stage in simulation.stages)
    assert min(planned, moved, recomputed) >= 3  # else nothing was tested


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "compute waits"])
@pytest.mark.parametrize("seed", range(12))
def test_plans_that_no_planner_would_make(seed: int, overlap: bool) -> None:
    """Late copies everywhere, to both tiers at once, on a device with room: any plan's prediction is what happens."""
    problem = scaled(random_problem(seed, layers=3 + seed, classes=1 + seed % 3))
    budgets = dataclasses.replace(problem.budgets, device_bytes=1 << 60)
    problem = dataclasses.replace(problem, budgets=budgets, overlap=overlap)
    draw = itertools.cycle([0.0, 0.35, 0.8, 1.0, 0.55])
    layers = [
        LayerPlan(point=ALL if a > 0.5 else ATTENTION, kept=k, host=(1 - k) * h, disk=(1 - k) * (1 - h))
        for a, k, h, _ in itertools.islice(zip(draw, draw, draw, draw, strict=False), len(problem.profile.layers) - 1)
    ]
    layers.append(LayerPlan())
    plan = ActivationPlan(problem=problem, layers=tuple(layers), stages=predict_stages(problem, layers))
    simulation = simulate(plan)
    assert plan.stages[0].stall_s > 0
    assert simulation.step_s == pytest.approx(plan.step_s, rel=AGREEMENT)


GRID = [
    (model, tokens, machine)
    for model, machine in itertools.product(("7b", "13b", "65b"), ("a800", "h100", "h200", "b200"))
    for tokens in (8 << 10, 64 << 10, 256 << 10, 1 << 20)
]


def grid_plan(model: str, tokens: int, machine: str, *, disk_bytes: int = 0) -> ActivationPlan:
    kind = hardware_preset(machine)
    if disk_bytes:
        kind = dataclasses.replace(kind, disk_write_bytes_per_s=20e9, disk_read_bytes_per_s=40e9)
    gpus = {"7b": 8, "13b": 16, "65b": 64}[model]
    layout = StepLayout(tokens=tokens, gpus=gpus, tp=8, cp=gpus // 8)
    profile = derive_profile(preset(model), kind, layout)
    budgets = Budgets(
        device_bytes=kind.device_bytes - 4 * GIB, host_bytes=2 * TIB, disk_bytes=disk_bytes, ranks_per_node=8
    )
    return plan_activations(profile, kind, budgets)


@pytest.mark.parametrize("disk_bytes", [0, 8 * TIB], ids=["host", "host and disk"])
def test_models_lengths_and_machines(disk_bytes: int) -> None:
    planned = 0
    for model, tokens, machine in GRID:
        try:
            plan = grid_plan(model, tokens, machine, disk_bytes=disk_bytes)
        except Infeasible:
            continue
        assert_agreement(plan, simulate(plan))
        planned += plan.declined is None
    assert planned >= 12


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("gpus", [2, 16])
def test_collectives_that_take_longer_than_the_work_beside_them(gpus: int, zero: int) -> None:
    machine = hardware_preset("h100")
    profile = derive_profile(
        preset("tiny"), machine, StepLayout(tokens=32, gpus=gpus), TrainingMethod(zero=zero), accumulate=2
    )
    budgets = Budgets(device_bytes=machine.device_bytes)
    plan = plan_activations(profile, machine, budgets, Pipeline(microbatches=2))
    assert_agreement(plan, simulate(plan), within=0.001)


def test_a_step_that_breaks_a_budget_is_refused_by_name() -> None:
    plan = grid_plan("7b", 1 << 20, "a800")
    peak = simulate(plan).stages[0].peak(TierName.HOST)
    less = dataclasses.replace(plan.problem.budgets, host_bytes=8 * (peak.nbytes - 5))
    simulation = simulate(plan, dataclasses.replace(plan.problem, budgets=less))
    assert [(number, over.tier, over.over_nbytes) for number, over in simulation.overflows] == [(0, TierName.HOST, 5)]
    with pytest.raises(PlanInvalid, match=f"host holds {format_bytes(peak.nbytes)}, 5 B more than its budget"):
        require_within_budgets(simulation)


def test_stages_of_one_node_share_its_host() -> None:
    """Two stages with a rank each: what one holds is missing to the other."""
    problem = scaled(random_problem(3, layers=8))
    budgets = dataclasses.replace(problem.budgets, device_bytes=1 << 60, ranks_per_node=2)
    pipeline = Pipeline(stages=2, microbatches=4, stage_ranks=1)
    moved = LayerPlan(kept=0.5, host=0.5)
    layers = tuple(LayerPlan() if number in (3, 7) else moved for number in range(8))

    def run(host_bytes: int) -> Simulation:
        own = dataclasses.replace(
            problem, budgets=dataclasses.replace(budgets, host_bytes=host_bytes), pipeline=pipeline
        )
        return simulate(ActivationPlan(problem=own, layers=layers, stages=predict_stages(own, layers)))

    both = sum(stage.peak(TierName.HOST).nbytes for stage in run(1 << 60).stages)
    assert not run(both).overflows
    assert [over.over_nbytes for _, over in run(both - 7).overflows] == [7, 7]


def test_a_profile_of_another_depth_is_refused() -> None:
    plan = grid_plan("7b", 8 << 10, "a800")
    with pytest.raises(PlanInvalid, match="the plan has 32 layers and the profile 40"):
        simulate(plan, grid_plan("13b", 8 << 10, "a800").problem)


def scaled(problem: ActivationProblem) -> ActivationProblem:
    """The same problem with every byte count and rate so many times larger."""
    profile, budgets, machine = problem.profile, problem.budgets, problem.hardware
    rates = ("d2h", "h2d", "duplex", "disk_write", "disk_read")
    wear = budgets.disk_wear_bytes_per_day
    return dataclasses.replace(
        problem,
        profile=dataclasses.replace(
            profile,
            classes=tuple(scaled_layer(layer) for layer in profile.classes),
            embedding=scaled_end(profile.embedding),
            head=scaled_end(profile.head),
        ),
        hardware=dataclasses.replace(
            machine,
            **{f"{name}_bytes_per_s": getattr(machine, f"{name}_bytes_per_s") * SCALE for name in rates},
        ),
        budgets=dataclasses.replace(
            budgets,
            device_bytes=budgets.device_bytes * SCALE if budgets.device_bytes < 1 << 40 else budgets.device_bytes,
            host_bytes=budgets.host_bytes * SCALE,
            disk_bytes=budgets.disk_bytes * SCALE,
            disk_wear_bytes_per_day=wear if wear is None or math.isinf(wear) else wear * SCALE,
        ),
    )


def scaled_layer(layer: LayerProfile) -> LayerProfile:
    return dataclasses.replace(
        layer,
        always_bytes=layer.always_bytes * SCALE,
        other_bytes=layer.other_bytes * SCALE,
        forward_transient_bytes=layer.forward_transient_bytes * SCALE,
        backward_transient_bytes=layer.backward_transient_bytes * SCALE,
        between_bytes=layer.between_bytes * SCALE,
        static=StaticBytes(other=layer.static_bytes * SCALE),
        points=tuple(
            dataclasses.replace(
                point,
                saved_bytes=point.saved_bytes * SCALE,
                beside_bytes=point.beside_bytes * SCALE,
                held_bytes=point.held_bytes * SCALE,
            )
            for point in layer.points
        ),
    )


def scaled_end(end: EmbeddingOrHeadProfile) -> EmbeddingOrHeadProfile:
    return dataclasses.replace(
        end,
        saved_bytes=end.saved_bytes * SCALE,
        transient_bytes=end.transient_bytes * SCALE,
        static=StaticBytes(other=end.static_bytes * SCALE),
    )
