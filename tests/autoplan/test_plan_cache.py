"""Which shapes of batches share a plan: never one for fewer tokens, seldom one for many more, and never too many of them."""

from __future__ import annotations

import random

import pytest
from activation_problems import random_problem

from memo.autoplan.plan_cache import LENGTHS_PER_OCTAVE, MAX_PLANS, CachedPlan, Phase, PlanCache, joint
from memo.mip.activation.plan import ActivationPlan
from memo.mip.activation.solver import solve_problem
from memo.mip.inputs.profile import Signature


@pytest.fixture(scope="module")
def plan() -> ActivationPlan:
    return solve_problem(random_problem(0, layers=3))


def shape(tokens: int, batch: int = 1, dtype: str = "float32") -> Signature:
    return Signature(model="m", batch=batch, tokens=tokens, dtype=dtype)


def settled(plan: ActivationPlan) -> CachedPlan:
    return CachedPlan(phase=Phase.SETTLED, setting=plan)


def visit(regimes: PlanCache, step: Signature, plan: ActivationPlan) -> Signature:
    """As planning does where every shape can be planned at once."""
    if regimes.find(step) is None:
        regimes.add(regimes.new_signature(step), settled(plan))
    assert regimes.signature is not None
    return regimes.signature


def test_plans_are_for_no_fewer_tokens_and_few_for_an_octave(plan: ActivationPlan) -> None:
    regimes = PlanCache()
    drawn = random.Random(0)
    made_for = {length: visit(regimes, shape(length), plan) for length in drawn.choices(range(4096, 8193), k=500)}
    assert all(length <= known.tokens <= 1.25 * length for length, known in made_for.items())
    assert len(set(made_for.values())) <= LENGTHS_PER_OCTAVE + 1, "and the first, which is exact"


def test_the_first_shape_and_powers_of_two_are_planned_exactly(plan: ActivationPlan) -> None:
    regimes = PlanCache()
    for tokens in (1000, 1024 << 3, 1 << 20, 3, 1):
        assert visit(regimes, shape(tokens), plan).tokens == tokens


@pytest.mark.parametrize("step", [shape(880), shape(1001), shape(960, batch=2), shape(960, dtype="bfloat16")])
def test_no_plan_serves_a_shape_that_it_does_not_cover(step: Signature, plan: ActivationPlan) -> None:
    regimes = PlanCache()
    regimes.add(shape(1000), settled(plan))
    assert regimes.find(shape(960)) is not None
    assert regimes.find(step) is None


def test_what_is_measured_goes_on_at_the_next_shape_and_what_failed_does_not() -> None:
    regimes = PlanCache()
    measured = CachedPlan(phase=Phase.MIXED)
    regimes.add(shape(100), measured)
    assert regimes.find(shape(333)) is measured
    assert regimes.signature == shape(333)
    measured.phase = Phase.SETTLED  # without a plan
    assert regimes.find(shape(100)) is None


def test_what_could_not_be_planned_is_measured_at_its_own_shape(plan: ActivationPlan) -> None:
    regimes = PlanCache()
    regimes.add(shape(100), CachedPlan(phase=Phase.SETTLED, setting=plan, profile=plan.problem.profile))
    regimes.add(shape(1000), tight := CachedPlan())
    assert regimes.find(shape(500)) is None
    assert regimes.find(shape(1000)) is tight


def test_the_least_used_plan_goes(plan: ActivationPlan) -> None:
    regimes = PlanCache()
    for power in range(MAX_PLANS):
        visit(regimes, shape(1 << power), plan)
    visit(regimes, shape(1), plan)
    visit(regimes, shape(1 << 39), plan)
    assert regimes.plans == MAX_PLANS
    assert regimes.find(shape(1)) is not None
    assert regimes.find(shape(2)) is None


def test_ranks_with_other_shapes_are_planned_for_one_that_covers_all() -> None:
    assert joint([shape(100, batch=4), shape(300, batch=1)]) == shape(300, batch=4)
