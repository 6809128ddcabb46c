"""Random steps of every schedule (tests/support/step_problems.py): no plan is refused, and each keeps its word."""

from __future__ import annotations

import collections

import pytest
from step_problems import random_step

from memo.errors import Infeasible
from memo.mip.activation import solve_problem
from memo.mip.activation.proof import verify_by_simulation

SHARE = 100
"""Seeds in the ordinary tests; all are twenty times as many."""


def tried(seed: int) -> str:
    """How planning ended. A plan that the checker refuses, or that does not keep its word when played, raises."""
    problem = random_step(seed)
    try:
        plan = solve_problem(problem)
    except Infeasible:
        return "infeasible"
    verify_by_simulation(plan)
    return "planned" if plan.declined is None else "declined"


@pytest.mark.parametrize("first", range(0, SHARE, 25))
def test_plans_of_random_steps_are_valid_and_keep_their_word(first: int) -> None:
    ends = collections.Counter(tried(seed) for seed in range(first, first + 25))
    assert ends["planned"] >= 10, ends  # else nothing was tested


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SHARE, 20 * SHARE, SHARE))
def test_plans_of_two_thousand_random_steps_are_valid_and_keep_their_word(first: int) -> None:
    ends = collections.Counter(tried(seed) for seed in range(first, first + SHARE))
    assert ends["planned"] >= 40, ends
