"""Last check before a plan is used: a simulated step must stay within the budgets and take the predicted time.

Of a step that is too long to be played whole, its first microbatches are: all that follow are like them, and no moment of
theirs holds more.
"""

from __future__ import annotations

import dataclasses

from memo.errors import PlanInvalid
from memo.mip.activation.in_flight import in_flight_within
from memo.mip.activation.plan import ActivationPlan, Pipeline
from memo.mip.activation.simulator import MAX_CALLS, require_within_budgets, simulate
from memo.mip.simulate.result import Simulation

AGREEMENT = 0.02
"""Largest deviation of the predicted step time from the simulated one, as a fraction of it."""
AGREEMENT_IN_TURNS = 0.1
"""Agreement where ranks have several chunks, of whose waits the prediction has the mean."""


def verify_by_simulation(plan: ActivationPlan) -> Simulation:
    """Simulates one step of a plan and compares it with the plan's prediction.

    Raises:
        PlanInvalid: the step breaks a budget, or its time is not the predicted one.
    """
    played, simulation = play(plan)
    require_within_budgets(simulation)
    if not agrees(played, simulation):
        raise PlanInvalid(
            f"the plan predicts a step of {played.step_s:.4g} s, but played event by event it takes "
            f"{simulation.step_s:.4g} s"
        )
    return simulation


def play(plan: ActivationPlan, *, most: int = MAX_CALLS) -> tuple[ActivationPlan, Simulation]:
    """Simulates one step of a plan, of a long one its first microbatches; with the plan of so many.

    Args:
        plan: the plan of the step.
        most: product of layers and microbatches up to which all of them are played; two of each stage always are.
    """
    played = shortened(plan, most)
    return played, dataclasses.replace(simulate(played), rest_s=plan.step_s - played.step_s)


def shortened(plan: ActivationPlan, most: int) -> ActivationPlan:
    """The plan, or the same one for a step of fewer microbatches, if that holds as much."""
    problem, pipeline = plan.problem, plan.problem.pipeline
    if pipeline.microbatches * len(plan.layers) <= most or pipeline.own is not None:
        return plan
    rounds = max(most // (len(plan.layers) * pipeline.stages), 2)  # as many for each stage, for schedules in turns
    microbatches = max(rounds * pipeline.stages, pipeline.held or 0)
    if microbatches >= pipeline.microbatches:
        return plan
    fewer = dataclasses.replace(pipeline, microbatches=microbatches)
    if not all(_holds_as_much(fewer, pipeline, stage) for stage in range(pipeline.stages)):
        return plan
    return dataclasses.replace(plan, problem=dataclasses.replace(problem, pipeline=fewer))


def _holds_as_much(fewer: Pipeline, pipeline: Pipeline, stage: int) -> bool:
    if pipeline.chunks == 1:
        return fewer.in_flight(stage) == pipeline.in_flight(stage)
    return in_flight_within(pipeline.turns(stage), fewer.turns(stage), chunks=pipeline.chunks)


def agrees(plan: ActivationPlan, simulation: Simulation) -> bool:
    """Whether the simulated step takes the predicted time, or is shorter for a reason that the prediction leaves out."""
    agreement = AGREEMENT if plan.problem.pipeline.chunks == 1 else AGREEMENT_IN_TURNS
    early_s = plan.step_s - simulation.step_s
    return -agreement * simulation.step_s <= early_s <= agreement * simulation.step_s + most_early_s(plan)


def most_early_s(plan: ActivationPlan) -> float:
    """Seconds by which a step may be shorter than predicted, beyond the agreement.

    The prediction has compute wait for copies that go on while compute waits for collectives; with several chunks also
    while the rank is idle.
    """
    pipeline = plan.problem.pipeline
    several = pipeline.chunks > 1
    waits_s = [stage.stall_s if several else min(stage.stall_s, stage.communication_s) for stage in plan.stages]
    return sum(waits_s) + (pipeline.microbatches - 1) * max(waits_s)
