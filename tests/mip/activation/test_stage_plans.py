"""A stage's part of a pipeline's plan is a plan of its own that keeps every rule, and predicts what the whole plan does."""

from __future__ import annotations

import dataclasses

import pytest
from activation_problems import random_problem

from memo.errors import Infeasible
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Pipeline,
    check_plan,
    extract_stage_plan,
    lower_tier_nbytes,
    solve_problem,
)
from memo.mip.activation.simulator import require_within_budgets, simulate
from memo.mip.inputs import PipelineSchedule

STAGES = 3


def problem(seed: int, schedule: PipelineSchedule) -> ActivationProblem:
    """All stages on one node, with storages so large that rounding matters."""
    pipeline = Pipeline(stages=STAGES, microbatches=6, schedule=schedule)
    whole = random_problem(seed, layers=9, classes=2, pipeline=pipeline)
    classes = tuple(
        dataclasses.replace(known, storages=10, largest_storage_bytes=known.full_bytes // 16)
        for known in whole.profile.classes
    )
    return dataclasses.replace(
        whole,
        profile=dataclasses.replace(whole.profile, classes=classes),
        budgets=dataclasses.replace(whole.budgets, ranks_per_node=STAGES),
        pipeline=dataclasses.replace(pipeline, stage_ranks=1),
    )


def plans(schedule: PipelineSchedule) -> list[ActivationPlan]:
    found = []
    for seed in range(12):
        try:
            found.append(solve_problem(problem(seed, schedule)))
        except Infeasible:
            continue
    assert len(found) > 3
    return found


@pytest.fixture(scope="module", params=PipelineSchedule)
def solved(request: pytest.FixtureRequest) -> list[ActivationPlan]:
    return plans(request.param)


def test_the_parts_are_valid_plans_and_make_up_the_whole(solved: list[ActivationPlan]) -> None:
    for plan in solved:
        parts = [extract_stage_plan(plan, stage) for stage in range(STAGES)]
        own = [index for stage in range(STAGES) for index in plan.problem.stages[stage].indices]
        assert sorted(own) == list(range(len(plan.layers)))
        assert [layer for part in parts for layer in part.layers] == [plan.layers[index] for index in own]
        assert tuple(part.stages[0] for part in parts) == plan.stages
        for part in parts:
            assert check_plan(part) is None
            require_within_budgets(simulate(part))


def test_what_the_stages_of_a_node_need_is_within_its_budgets(solved: list[ActivationPlan]) -> None:
    moved = 0
    for plan in solved:
        hosts, disks = zip(*(lower_tier_nbytes(plan, stage) for stage in range(STAGES)), strict=True)
        assert sum(hosts) <= plan.problem.budgets.host_bytes
        assert sum(disks) <= plan.problem.budgets.disk_bytes
        moved += sum(hosts) > sum(stage.peak_host_bytes for stage in plan.stages) > 0
    assert moved, "or nothing was tested"
