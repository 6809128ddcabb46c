from __future__ import annotations

import dataclasses
import math
import random

import pytest
from small_clusters import all_candidates, random_space

from memo.mip.activation import find_plan
from memo.search import Bound
from memo.search.bounds import (
    BoundSequence,
    budget_bound,
    has_room,
    keeps_all,
    kept_bounds,
    schedule_bounds,
    work_bounds,
)

ROUNDING = 1e-9


@pytest.mark.parametrize("block", range(8))
def test_every_bound_is_below_the_planners_step(block: int) -> None:
    """Of hundreds of random candidates; where a bound says that nothing fits, the planner finds nothing."""
    for seed in range(2000 + 12 * block, 2012 + 12 * block):
        space, chance = random_space(seed), random.Random(seed)
        candidates = all_candidates(space)
        for candidate in chance.sample(candidates, min(6, len(candidates))):
            problem = space.request_of(candidate).problem(chance.choice(space.request.tiles))
            bare = dataclasses.replace(candidate, zero=0, sharded_over=None)
            nothing_sharded = space.request_of(bare).problem(space.request.tiles[0])
            plan = find_plan(problem)
            step_s = math.inf if plan is None else plan.step_s
            ladder, kept = kept_bounds(problem)
            bounds = {
                "work": work_bounds(nothing_sharded).seconds,
                "schedule": schedule_bounds(nothing_sharded).seconds,
                "kept": ladder.seconds,
                "budget": budget_bound(problem),
                "room": 0.0 if has_room(problem) else math.inf,
            }
            for what, bound_s in bounds.items():
                assert bound_s <= step_s * (1 + ROUNDING), (seed, what, candidate)
            if keeps_all(kept):
                assert plan is not None
                assert step_s == pytest.approx(ladder.seconds, rel=ROUNDING)


def test_a_ladder_names_the_first_bound_that_is_too_high() -> None:
    ladder = BoundSequence().raised(
        (Bound.COMPUTE, 1.0), (Bound.BUBBLE, 3.0), (Bound.COMMUNICATION, 2.0), (Bound.COMMUNICATION, 4.0)
    )
    assert ladder.seconds == 4.0
    assert [ladder.kind(limit) for limit in (0.5, 1.5, 3.5)] == [Bound.COMPUTE, Bound.BUBBLE, Bound.COMMUNICATION]
    assert ladder.raised((Bound.MEMORY, math.inf)).kind(9.0) is Bound.MEMORY
