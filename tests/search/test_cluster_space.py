"""A search on groups of nodes that are not alike is that of planning every placement, sharding and numbers of layers."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from small_clusters import all_candidates, every_division, random_cluster_space

from memo.errors import UsageError
from memo.mip.activation import check_plan, find_plan
from memo.mip.cluster import Crossing
from memo.mip.simulate import verify_by_simulation
from memo.search import Candidate, Space, search_layouts
from memo.search.bounds import has_room, keeps_all, kept_bounds, schedule_bounds

EQUAL = 1e-9
OTHER_DIVISION = 0.002
"""What other numbers of layers than the search tries spare of the step at most; at two of these seeds they do."""


def step_s(space: Space, candidate: Candidate) -> float:
    """The planner's step; infinite where no plan fits."""
    found = math.inf
    for tiles in space.request.tiles:
        try:
            plan = find_plan(space.problem(candidate, tiles))
        except UsageError:
            continue
        found = min(found, math.inf if plan is None else plan.step_s)
    return found


def best_of_layouts(space: Space, candidates: list[Candidate]) -> list[float]:
    best: dict[tuple[object, ...], float] = {}
    for candidate in candidates:
        best[candidate.layout] = min(step_s(space, candidate), best.get(candidate.layout, math.inf))
    return sorted(step for step in best.values() if math.isfinite(step))[:3]


@pytest.mark.parametrize("seed", [0, 1, 3, 5, 6, 8, 21, 23, 26, 27, 32, 39])
def test_the_answer_is_that_of_planning_everything(seed: int) -> None:
    space = random_cluster_space(seed)
    candidates = all_candidates(space)
    found = search_layouts(space, wanted=3)
    steps = [one.step_s for one in found.best]
    assert found.candidates == len(candidates)
    assert len(found.planned) + len(found.without_plan) + sum(one.count for one in found.closed) == (
        len(candidates) + found.moved
    )
    balanced = [
        dataclasses.replace(other, zero=one.zero)
        for one in candidates
        for other in space.further(dataclasses.replace(one, zero=3))
    ]
    for one_s, other_s in zip(steps, best_of_layouts(space, candidates + balanced), strict=True):
        assert one_s <= other_s * (1 + EQUAL)
    for one_s, least_s in zip(steps, best_of_layouts(space, every_division(space)), strict=True):
        assert least_s * (1 - EQUAL) <= one_s
        assert one_s * (1 - OTHER_DIVISION) <= least_s
    for one in found.best:
        assert check_plan(one.plan) is None
        verify_by_simulation(one.plan)


@pytest.mark.parametrize("block", range(4))
def test_every_bound_is_below_the_planners_step_on_a_cluster(block: int) -> None:
    for seed in range(100 + 8 * block, 108 + 8 * block):
        space, chance = random_cluster_space(seed), random.Random(seed)
        every = every_division(space)
        for candidate in chance.sample(every, min(6, len(every))):
            try:
                problem = space.problem(candidate, chance.choice(space.request.tiles))
            except UsageError:
                continue
            bare = dataclasses.replace(candidate, zero=0, sharded_over=None, sparse_embedding=False)
            plan, (ladder, kept) = find_plan(problem), kept_bounds(problem)
            least_s = math.inf if plan is None else plan.step_s
            bounds = {
                "work": space.least_work(candidate.shape, candidate.setting).seconds,
                "schedule": schedule_bounds(space.problem(bare, space.request.tiles[0])).seconds,
                "kept": ladder.seconds,
                "room": 0.0 if has_room(problem) else math.inf,
            }
            for what, bound_s in bounds.items():
                assert bound_s <= least_s * (1 + EQUAL), (seed, what, candidate)
            if keeps_all(kept):
                assert least_s == pytest.approx(ladder.seconds, rel=EQUAL)


def test_spaces_have_every_kind_of_placement_and_sharding() -> None:
    """What the tests above are about: pipelines and replicas that cross groups, ZeRO 0 to 3, and hybrid groups."""
    crossings, shardings = set(), set()
    for seed in (0, 1, 8, 39):
        space = random_cluster_space(seed)
        for one in all_candidates(space):
            placement = space.placement(one)
            assert placement is not None
            crossings.add(placement.crossing)
            shardings.add((one.zero, one.sharded_over is not None))
    assert crossings == set(Crossing)
    assert shardings == {(0, False), (1, False), (2, False), (3, False), (3, True)}


def test_processes_do_not_change_the_answer_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    space = random_cluster_space(1)
    alone = search_layouts(space)
    monkeypatch.setattr("memo.search.search._Search._has_processes", lambda search: True)
    beside = search_layouts(space, workers=2)
    assert [(one.candidate, one.plan) for one in alone.planned] == [(one.candidate, one.plan) for one in beside.planned]
    assert alone.closed == beside.closed
