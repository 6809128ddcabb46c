"""Last check before a plan is used: a simulated step must stay within the budgets and take the predicted time."""

from __future__ import annotations

from memo.errors import PlanInvalid
from memo.mip.activation.plan import ActivationPlan, chunk_layers
from memo.mip.inputs.pipeline_schedules import Kind
from memo.mip.simulate.result import Simulation
from memo.mip.simulate.simulator import require_within_budgets, simulate

__all__ = ["AGREEMENT", "AGREEMENT_IN_TURNS", "agrees", "most_early_s", "prove"]

AGREEMENT = 0.02
"""Largest deviation of the predicted step time from the simulated one, as a fraction of it."""
AGREEMENT_IN_TURNS = 0.1
"""The same where ranks have several chunks, of whose waits the prediction has the mean."""


def prove(plan: ActivationPlan) -> Simulation:
    """Simulates one step of a plan and compares it with the plan's prediction.

    Raises:
        PlanInvalid: the step breaks a budget, or its time is not the predicted one.
    """
    simulation = simulate(plan)
    require_within_budgets(simulation)
    if not agrees(plan, simulation):
        raise PlanInvalid(
            f"the plan predicts a step of {plan.step_s:.4g} s, but played event by event it takes {simulation.step_s:.4g} s"
        )
    return simulation


def agrees(plan: ActivationPlan, simulation: Simulation) -> bool:
    """Whether the simulated step takes the predicted time, or is shorter for a reason that the prediction leaves out."""
    agreement = AGREEMENT if plan.problem.pipeline.chunks == 1 else AGREEMENT_IN_TURNS
    early_s = plan.step_s - simulation.step_s
    return -agreement * simulation.step_s <= early_s <= agreement * simulation.step_s + most_early_s(plan)


def most_early_s(plan: ActivationPlan) -> float:
    """Seconds by which a step may be shorter than predicted, beyond the agreement.

    The prediction has every layer recomputed in every microbatch; one whose backward comes before another forward is
    not. It has compute wait for copies that go on while compute waits for collectives; with several chunks also while
    the rank is idle.
    """
    pipeline, stages = plan.problem.pipeline, range(plan.problem.pipeline.stages)
    spared_s = sum(_spared_s(plan, stage) for stage in stages)
    several = pipeline.chunks > 1
    waits_s = [stage.stall_s if several else min(stage.stall_s, stage.communication_s) for stage in plan.stages]
    return spared_s + sum(waits_s) + (pipeline.microbatches - 1) * max(waits_s)


def _spared_s(plan: ActivationPlan, stage: int) -> float:
    """Seconds of recompute that a stage is spared in a step, since the last layer of a forward was still whole."""
    problem, known = plan.problem, plan.problem.profile.layer_profiles()
    pipeline, chunks = problem.pipeline, chunk_layers(problem, stage)
    again_s = [plan.layers[own[-1]].recompute_s(known[own[-1]]) for own in chunks]
    if pipeline.chunks == 1:
        return again_s[0] * (pipeline.microbatches if pipeline.in_flight(stage) == 1 else 1)
    spared_s, latest = 0.0, None
    for turn in pipeline.turns(stage):
        if turn.kind is Kind.FORWARD:
            latest = turn.call
        elif turn.kind is not Kind.WEIGHT and turn.call == latest:
            spared_s += again_s[turn.chunk]
    return spared_s
