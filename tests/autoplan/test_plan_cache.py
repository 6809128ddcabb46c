"""Plans shared by shapes of batches: none for fewer tokens, seldom one for many more, and never too many of them."""

from __future__ import annotations

import random

import pytest
from activation_problems import random_problem

from memo.autoplan.plan_cache import LENGTHS_PER_OCTAVE, MAX_PLANS, CachedPlan, Phase, PlanCache, joint
from memo.mip.activation import ActivationPlan, solve_problem
from memo.mip.inputs import Signature


@pytest.fixture(scope="module")
def plan() -> ActivationPlan:
    return solve_problem(random_problem(0, layers=3))


def shape(tokens: int, batch: int = 1, dtype: str = "float32") -> Signature:
    return Signature(model="m", batch=batch, tokens=tokens, dtype=dtype)


def settled(plan: ActivationPlan) -> CachedPlan:
    return CachedPlan(phase=Phase.SETTLED, setting=plan)


def visit(cache: PlanCache, step: Signature, plan: ActivationPlan) -> Signature:
    """As planning does where every shape can be planned at once."""
    if cache.find(step) is None:
        cache.add(cache.new_signature(step), settled(plan))
    assert cache.signature is not None
    return cache.signature


def test_plans_are_for_no_fewer_tokens_and_few_for_an_octave(plan: ActivationPlan) -> None:
    cache = PlanCache()
    drawn = random.Random(0)
    made_for = {length: visit(cache, shape(length), plan) for length in drawn.choices(range(4096, 8193), k=500)}
    assert all(length <= known.tokens <= 1.25 * length for length, known in made_for.items())
    assert len(set(made_for.values())) <= LENGTHS_PER_OCTAVE + 1, "and the first, which is exact"


def test_the_first_shape_and_powers_of_two_are_planned_exactly(plan: ActivationPlan) -> None:
    cache = PlanCache()
    for tokens in (1000, 1024 << 3, 1 << 20, 3, 1):
        assert visit(cache, shape(tokens), plan).tokens == tokens


@pytest.mark.parametrize("step", [shape(880), shape(1001), shape(960, batch=2), shape(960, dtype="bfloat16")])
def test_no_plan_serves_a_shape_that_it_does_not_cover(step: Signature, plan: ActivationPlan) -> None:
    cache = PlanCache()
    cache.add(shape(1000), settled(plan))
    assert cache.find(shape(960)) is not None
    assert cache.find(step) is None


def test_what_is_measured_goes_on_at_the_next_shape_and_what_failed_does_not() -> None:
    cache = PlanCache()
    measured = CachedPlan(phase=Phase.PROFILING)
    cache.add(shape(100), measured)
    assert cache.find(shape(333)) is measured
    assert cache.signature == shape(333)
    measured.phase = Phase.SETTLED  # without a plan
    assert cache.find(shape(100)) is None


def test_what_could_not_be_planned_is_measured_at_its_own_shape(plan: ActivationPlan) -> None:
    cache = PlanCache()
    cache.add(shape(100), CachedPlan(phase=Phase.SETTLED, setting=plan, profile=plan.problem.profile))
    cache.add(shape(1000), tight := CachedPlan())
    assert cache.find(shape(500)) is None
    assert cache.find(shape(1000)) is tight


def test_the_least_used_plan_goes(plan: ActivationPlan) -> None:
    cache = PlanCache()
    for power in range(MAX_PLANS):
        visit(cache, shape(1 << power), plan)
    visit(cache, shape(1), plan)
    visit(cache, shape(1 << 39), plan)
    assert cache.plans == MAX_PLANS
    assert cache.find(shape(1)) is not None
    assert cache.find(shape(2)) is None


def test_ranks_with_other_shapes_are_planned_for_one_that_covers_all() -> None:
    assert joint([shape(100, batch=4), shape(300, batch=1)]) == shape(300, batch=4)
