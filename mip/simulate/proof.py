"""Last check before a plan is used: a simulated step must stay within the budgets and take the predicted time."""

from __future__ import annotations

from memo.errors import PlanInvalid
from memo.mip.activation.plan import ActivationPlan
from memo.mip.simulate.result import Simulation
from memo.mip.simulate.simulator import require_within_budgets, simulate

__all__ = ["AGREEMENT", "prove"]

AGREEMENT = 0.02
"""Largest deviation of the predicted step time from the simulated one, as a fraction of it."""
AGREEMENT_IN_TURNS = 0.1
"""The same where ranks have several chunks: the prediction uses mean waits, and copies go on while a rank is idle."""


def prove(plan: ActivationPlan) -> Simulation:
    """Simulates one step of a plan and compares it with the plan's prediction.

    Raises:
        PlanInvalid: the step breaks a budget, or its time is not the predicted one.
    """
    simulation = simulate(plan)
    require_within_budgets(simulation)
    agreement = AGREEMENT if plan.problem.pipeline.chunks == 1 else AGREEMENT_IN_TURNS
    if abs(plan.step_s - simulation.step_s) > agreement * simulation.step_s:
        raise PlanInvalid(
            f"the plan predicts a step of {plan.step_s:.4g} s, but played event by event it takes {simulation.step_s:.4g} s"
        )
    return simulation
