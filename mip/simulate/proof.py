"""The last step before a plan is used: it is played event by event, and must do what it foretells within its budgets."""

from __future__ import annotations

from memo.errors import PlanInvalid
from memo.mip.activation.plan import ActivationPlan
from memo.mip.simulate.result import Simulation
from memo.mip.simulate.simulator import require_within_budgets, simulate

__all__ = ["AGREEMENT", "prove"]

AGREEMENT = 0.02
"""How far the predicted step time may be from the simulated one, as a share of it."""
AGREEMENT_IN_TURNS = 0.1
"""The same where ranks have several chunks: what turns wait for is predicted by its mean, and idle ranks copy on."""


def prove(plan: ActivationPlan) -> Simulation:
    """One simulated step of a plan that is fit to be used.

    Raises:
        PlanInvalid: the step breaks a budget, or takes another time than predicted.
    """
    simulation = simulate(plan)
    require_within_budgets(simulation)
    agreement = AGREEMENT if plan.problem.pipeline.chunks == 1 else AGREEMENT_IN_TURNS
    if abs(plan.step_s - simulation.step_s) > agreement * simulation.step_s:
        raise PlanInvalid(
            f"the plan predicts a step of {plan.step_s:.4g} s, but played event by event it takes {simulation.step_s:.4g} s"
        )
    return simulation
