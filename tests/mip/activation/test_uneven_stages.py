"""Pipelines whose stages have different numbers of layers, machines and links: predicted, checked, simulated, written."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest
from activation_problems import layer, machine, profile_of, random_problem, with_collectives

from memo.errors import Infeasible, PlanError
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    StageMachine,
    check_plan,
    extract_stage_plan,
    plan_to_json,
    predict_stages,
    solve_problem,
)
from memo.mip.activation.checker import Rule
from memo.mip.activation.files import plan_from_json
from memo.mip.activation.proof import verify_by_simulation
from memo.mip.activation.simulator import simulate
from memo.mip.inputs import PipelineSchedule

GPIPE, F1B = PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B
INTERLEAVED, ZERO_BUBBLE, V = (
    PipelineSchedule.INTERLEAVED,
    PipelineSchedule.ZERO_BUBBLE,
    PipelineSchedule.ZERO_BUBBLE_V,
)


def nodes_one_by_one(plan: ActivationPlan) -> list[dict[int, int]]:
    """Ranks of each stage on a node, once for all nodes that are alike."""
    problem, pipeline = plan.problem, plan.problem.pipeline
    nodes: list[dict[int, int]] = []
    filling: dict[int, int] = {}
    for stage in range(pipeline.stages):
        machine = problem.machine_of(stage)
        size = machine.budgets.ranks_per_node
        if machine.new_node:
            nodes.append(filling)
            filling = {}
        left = machine.node_ranks or pipeline.stage_ranks or size
        room = size - sum(filling.values())
        if 0 < room <= left:
            nodes.append(filling | {stage: room})
            full, left = divmod(left - room, size)
            nodes += [{stage: size}] * bool(full)
            filling = {}
        if left:
            filling[stage] = left
    return [node for node in [*nodes, filling] if node]


def kept(problem: ActivationProblem) -> ActivationPlan:
    layers = (LayerPlan(),) * len(problem.profile.layers)
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))


def by_hand(pipeline: Pipeline, *machines: StageMachine, layers: int = 4, send_s: float = 5.0) -> ActivationProblem:
    """Layers of 10 s forward and 20 s backward, in more memory than they need."""
    profile = profile_of(*[layer()] * layers, send_s=send_s)
    budgets = Budgets(device_bytes=1 << 40)
    return ActivationProblem(profile=profile, hardware=machine(), budgets=budgets, pipeline=pipeline, machines=machines)


def random_machines(problem: ActivationProblem, seed: int) -> tuple[StageMachine, ...]:
    draw = random.Random(seed)
    link, budgets = problem.hardware, problem.budgets

    def one() -> StageMachine:
        hardware = dataclasses.replace(
            link,
            name=f"kind {draw.randint(0, 2)}",
            d2h_bytes_per_s=draw.uniform(0.3, 2) * link.d2h_bytes_per_s,
            h2d_bytes_per_s=draw.uniform(0.3, 2) * link.h2d_bytes_per_s,
        )
        device = int(draw.uniform(0.9, 1.5) * budgets.device_bytes)
        host = int(draw.uniform(0.5, 2) * budgets.host_bytes)
        return StageMachine(
            hardware=hardware,
            budgets=dataclasses.replace(budgets, device_bytes=device, host_bytes=host),
            link_share=draw.uniform(0, 0.4),
            send_s=draw.choice([0.0, draw.uniform(0, 60)]),
            optimizer_s=draw.uniform(0, 5),
            optimizer_exchange_s=draw.uniform(0, 5),
            new_node=True,
        )

    return tuple(one() for _ in range(problem.pipeline.stages))


def cut(layers: int, runs: int, draw: random.Random) -> tuple[int, ...]:
    ends = [0, *sorted(draw.sample(range(1, layers), runs - 1)), layers]
    return tuple(end - start for start, end in itertools.pairwise(ends))


def test_each_stage_has_the_layers_that_the_pipeline_says() -> None:
    problem = by_hand(Pipeline(stages=2, microbatches=2, layers=(3, 1)))
    assert [problem.stages[stage].indices for stage in (0, 1)] == [(0, 1, 2), (3,)]
    runs = Pipeline(stages=2, microbatches=4, schedule=V, layers=(1, 3, 2, 1))
    problem = by_hand(runs, layers=7)  # in a V stage 0 has the first and the last run
    assert problem.stages[0].chunks == (range(1), range(6, 7))
    assert problem.stages[1].chunks == (range(1, 4), range(4, 6))


def test_a_step_of_uneven_stages_by_hand() -> None:
    # stage 0, 3 layers: F0 0-30, F1 30-60;  stage 1, 1 layer: F0 35-45, B0 45-65, F1 65-75, B1 75-95, each sent in 5 s
    # stage 0: B0 70-130, B1 130-190
    problem = by_hand(Pipeline(stages=2, microbatches=2, layers=(3, 1)))
    plan = kept(problem)
    assert plan.step_s == 190.0
    assert simulate(plan).step_s == 190.0
    assert check_plan(plan) is None
    # The optimizer begins when both have their gradients; it takes 1 + 2 s on one stage and 4 s on the other.
    slow, quick = (
        StageMachine(
            hardware=machine(), budgets=problem.budgets, send_s=5.0, optimizer_s=own, optimizer_exchange_s=gather
        )
        for own, gather in ((1.0, 2.0), (4.0, 0.0))
    )
    plan = kept(dataclasses.replace(problem, machines=(slow, quick)))
    assert plan.step_s == 194.0
    assert simulate(plan).step_s == 194.0


def test_messages_cross_a_link_one_after_another() -> None:
    # Three forwards end at 10, 20, 30; a message takes 50 s, so they arrive at 60, 110, 160. The last stage's backwards end
    # at 190, 210, 230 and arrive at 240, 290, 340; the last backward ends 20 s later.
    plan = kept(by_hand(Pipeline(stages=2, microbatches=3, schedule=GPIPE), layers=2, send_s=50.0))
    assert plan.step_s == 360.0
    assert simulate(plan).step_s == 360.0


@pytest.mark.parametrize("schedule", [GPIPE, F1B, INTERLEAVED, ZERO_BUBBLE, V])
def test_plans_of_stages_that_differ_pass_the_checker_and_the_simulator(schedule: PipelineSchedule) -> None:
    found = 0
    for seed in range(14):
        draw = random.Random(seed)
        stages, layers = draw.randint(2, 3), draw.randint(8, 11)
        runs = stages * schedule.default_chunks
        pipeline = Pipeline(
            stages=stages, microbatches=2 * stages, schedule=schedule, layers=cut(layers, runs, draw), stage_ranks=1
        )
        problem = random_problem(seed, layers=layers, classes=2, pipeline=pipeline)
        if draw.random() < 0.5:
            problem = with_collectives(problem, seed)
        problem = dataclasses.replace(problem, machines=random_machines(problem, seed))
        try:
            plan = solve_problem(problem)
        except Infeasible:
            continue
        verify_by_simulation(plan)
        for stage in range(stages):
            budget = problem.machines[stage].budgets.device_bytes
            assert plan.stages[stage].peak_device_bytes <= budget
            alone = extract_stage_plan(plan, stage)
            assert check_plan(alone) is None
            assert alone.problem.hardware == problem.machines[stage].hardware
        assert plan_from_json(plan_to_json(plan)) == plan
        found += 1
    assert found >= 4


def test_equal_machines_are_one_machine_to_the_bit() -> None:
    for seed in range(6):
        pipeline = Pipeline(stages=3, microbatches=5, stage_ranks=1)
        problem = with_collectives(random_problem(seed, layers=9, pipeline=pipeline), seed)
        same = dataclasses.replace(problem, machines=tuple(problem.machine_of(stage) for stage in range(3)))
        sized = dataclasses.replace(same, pipeline=dataclasses.replace(pipeline, layers=(3, 3, 3)))
        try:
            plan = solve_problem(problem)
        except Infeasible:
            continue
        for other in (same, sized):
            again = solve_problem(other)
            assert (again.step_s, again.stages, again.layers) == (plan.step_s, plan.stages, plan.layers)
            assert simulate(again).step_s == simulate(plan).step_s


def test_the_checker_has_each_stages_own_budgets_and_links() -> None:
    plan = kept(by_hand(Pipeline(stages=2, microbatches=2, layers=(3, 1))))
    base = plan.problem.machine_of(0)
    small = dataclasses.replace(base, budgets=Budgets(device_bytes=plan.stages[1].peak_device_bytes - 1))
    found = check_plan(dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, machines=(base, small))))
    assert found is not None
    assert found.rule is Rule.DEVICE
    assert "in layers.3 forward" in found.message
    unlinked = dataclasses.replace(
        base, hardware=machine(d2h_bytes_per_s=0.0), budgets=Budgets(device_bytes=1 << 40, host_bytes=1 << 40)
    )
    moving = dataclasses.replace(
        plan,
        problem=dataclasses.replace(plan.problem, machines=(unlinked, base)),
        layers=(LayerPlan(kept=0.0, host=1.0), *plan.layers[1:]),
    )
    found = check_plan(moving)
    assert found is not None
    assert found.message == "layer 0 moves to the host, which has no bandwidth"


def test_each_stage_moves_over_its_own_links() -> None:
    # Nothing can be recomputed, and the device has room for what stage 1 keeps less 140 bytes. Only its links move any.
    block = layer(all=140, matmuls=None, attention=None)
    profile = profile_of(*[block] * 6)
    moving = StageMachine(hardware=machine(), budgets=Budgets(device_bytes=1 << 40, host_bytes=1 << 40))
    still = dataclasses.replace(moving, hardware=machine(d2h_bytes_per_s=0.0))
    pipeline = Pipeline(stages=2, microbatches=2, layers=(1, 5))
    problem = ActivationProblem(
        profile=profile, hardware=machine(), budgets=moving.budgets, pipeline=pipeline, machines=(still, moving)
    )
    most = kept(problem).stages[1].peak_device_bytes
    tight = dataclasses.replace(moving, budgets=dataclasses.replace(moving.budgets, device_bytes=most - 140))
    plan = solve_problem(dataclasses.replace(problem, machines=(still, tight)))
    assert plan.layers[0].host == 0
    assert sum(own.host for own in plan.layers[1:]) > 0
    assert plan.stages[1].peak_device_bytes <= most - 140
    unlinked = dataclasses.replace(tight, hardware=still.hardware)
    with pytest.raises(Infeasible, match="the device of stage 1, by hand, lacks"):
        solve_problem(dataclasses.replace(problem, machines=(moving, unlinked)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layers": (3,)}, "1 numbers of layers for 2 runs of layers"),
        ({"layers": (4, 0)}, "a run of 0 layers"),
        ({"layers": (4, -1)}, "a run of -1 layers"),
        ({"layers": (2, 3)}, "stages of 5 layers are not 4 layers"),
    ],
)
def test_numbers_of_layers_that_cannot_be_are_refused(wrong: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        by_hand(Pipeline(stages=2, microbatches=2, **wrong))


def test_a_machine_for_each_stage_or_for_none() -> None:
    one = by_hand(Pipeline(stages=2, microbatches=2)).machine_of(0)
    with pytest.raises(PlanError, match="1 machines for 2 stages"):
        by_hand(Pipeline(stages=2, microbatches=2), one)


def test_ranks_without_end_are_refused() -> None:
    one = by_hand(Pipeline(stages=2, microbatches=2)).machine_of(0)
    many = dataclasses.replace(one, node_ranks=1 << 40)
    with pytest.raises(PlanError, match="ranks are out of range"):
        by_hand(Pipeline(stages=2, microbatches=2), many, many)


@pytest.mark.parametrize(
    ("key", "value"),
    [("send_s", -1.0), ("optimizer_s", -1.0), ("link_share", 1.0), ("node_ranks", -1), ("new_node", 1), ("speed", 1)],
)
def test_a_machine_in_a_plan_file_is_read_strictly(key: str, value: object) -> None:
    problem = by_hand(Pipeline(stages=2, microbatches=2))
    machines = tuple(problem.machine_of(stage) for stage in range(2))
    root = json.loads(plan_to_json(kept(dataclasses.replace(problem, machines=machines))))
    root["problem"]["machines"][1][key] = value
    with pytest.raises(PlanError) as caught:
        plan_from_json(json.dumps(root))
    assert "\n" not in str(caught.value)
    assert key in str(caught.value) or "stage machine" in str(caught.value)


def test_planner_and_checker_agree_who_shares_a_node() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        stages = draw.randint(1, 5)
        base = by_hand(Pipeline(stages=stages, stage_ranks=draw.randint(1, 9)), layers=8)
        size, machines, ranks = 0, [], 0
        for stage in range(stages):
            new = stage > 0 and draw.random() < 0.4
            if new or stage == 0:
                size, ranks = draw.randint(1, 8), draw.choice([0, draw.randint(1, 4)])
            budgets = dataclasses.replace(base.budgets, ranks_per_node=size)
            machines.append(dataclasses.replace(base.machine_of(0), budgets=budgets, new_node=new, node_ranks=ranks))
        problem = dataclasses.replace(base, machines=tuple(machines))
        theirs = {tuple(node.items()) for node in nodes_one_by_one(kept(problem))}
        ours = {tuple(node.items()) for node in problem.nodes}
        assert ours <= theirs, seed
        assert {stage for node in ours for stage, _ in node} == set(range(stages))
