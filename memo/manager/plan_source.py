"""Plan sources of a Manager: asked at each forward, they apply plans to its engine.

AutoPlan        measures steps and makes plans (memo.autoplan.controller)
FixedPlan       one given plan for all steps
FixedSetting    no plan: a fixed alpha; the device budget only limits how far reloads run ahead
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memo.autoplan import PlanOutcome, PlanSource, saved_alone, saved_peak_bytes
from memo.errors import PlanError
from memo.mip.activation import (
    ActivationPlan,
    extract_stage_plan,
    in_flight_within,
    read_activation_plan,
    require_valid,
)
from memo.mip.simulate import verify_by_simulation

if TYPE_CHECKING:
    from memo.autoplan import Actuator
    from memo.mip.activation import ActivationProblem
    from memo.parallel import PipelineOrder


def checked_plan(problem: ActivationProblem) -> ActivationPlan:
    """Solves a problem, checks the plan against every rule, and simulates it event by event.

    Raises:
        Infeasible: no plan fits; the message says which budget would.
        PlanInvalid: the simulated step exceeds a budget or the prediction. This is a bug, found before the plan is
            used.
    """
    from memo.mip.activation import solve_problem  # imported here: runs with a given plan need no solver

    plan = solve_problem(problem)
    verify_by_simulation(plan)
    return plan


def read_plan(plan: ActivationPlan | str | os.PathLike[str]) -> ActivationPlan:
    """Reads a plan, if given as a file, and checks it against every rule.

    Raises:
        PlanError: the file cannot be read or is no activation plan, or the plan breaks a rule, which the message names.
    """
    if not isinstance(plan, ActivationPlan):
        plan = read_activation_plan(plan)
    require_valid(plan)
    return plan


def own_part(plan: ActivationPlan, order: PipelineOrder | None) -> ActivationPlan:
    """Returns this rank's part of a plan: all of it, or the pipeline stages that the schedule gives to this rank.

    Raises:
        PlanError: the plan is for another pipeline or schedule, or for fewer microbatches in flight.
    """
    pipeline = plan.problem.pipeline
    if pipeline.stages == 1:
        return plan
    if order is None:
        raise PlanError(
            f"plan: it is for {pipeline.stages} pipeline stages; give the schedule, which says which of them is here"
        )
    stages = pipeline.stages * pipeline.chunks
    if order.stages != stages:
        raise PlanError(f"plan: it is for {stages} pipeline stages, and the schedule has {order.stages}")
    for stage in range(pipeline.stages):
        if pipeline.chunk_positions(stage) == list(order.own):
            _require_room(plan, stage, order)
            return extract_stage_plan(plan, stage)
    raise PlanError(
        f"plan: it is for {pipeline.schedule}, which gives no rank stages {order.own}, as the schedule does"
    )


def _require_room(plan: ActivationPlan, stage: int, order: PipelineOrder) -> None:
    """Raises PlanError if the schedule has more microbatches in flight, at any time, than the plan was made for."""
    pipeline = plan.problem.pipeline
    if pipeline.chunks == 1:
        held = pipeline.in_flight(stage)
        if order.held > held:
            raise PlanError(
                f"plan: it is for {held} microbatches in flight on stage {stage}, and the schedule holds {order.held}; "
                f"make a plan for its --schedule and --accumulate, or give no plan"
            )
        return
    sizes = tuple(map(len, plan.problem.stages[stage].chunks))
    if order.turns is None or order.turns.layers != sizes:
        raise PlanError(f"plan: the stages of rank {stage} have {sizes} layers there, and others in the model")
    if not in_flight_within(order.turns.turns, pipeline.turns(stage), chunks=pipeline.chunks):
        raise PlanError(
            f"plan: it is for {pipeline.schedule} of {pipeline.microbatches} microbatches, and the schedule holds other "
            f"ones at a time; make a plan for its --schedule and --accumulate, or give no plan"
        )


class FixedPlan(PlanSource):
    """One given plan for every step.

    Its fractions are also used for batches of other shapes, for which its prediction and its peaks do not hold.

    Args:
        actuator: applies the plan to the model's layers.
        plan: the plan.
        name: name of the plan for the error message, such as its file's.

    Raises:
        PlanError: the plan has another number of layers than the model, its layers another number of MLP tiles, or it
            was made for another codec.
    """

    def __init__(self, actuator: Actuator, plan: ActivationPlan, *, name: str = "the plan") -> None:
        planned = plan.problem.profile.codec
        if planned != actuator.codec:
            made, runs = (f"codec {one}" if one else "no codec" for one in (planned, actuator.codec))
            do = f'give codec="{planned}" (memo train --codec {planned})' if planned else "leave the codec out"
            raise PlanError(f"plan: it is for {made}, and the run has {runs}; {do}, or make another plan")
        if len(plan.layers) != actuator.n_layers:
            raise PlanError(f"{name} is for {len(plan.layers)} layers; the model has {actuator.n_layers}")
        tiles = plan.problem.profile.mlp_tiles
        if tiles != actuator.mlp_tiles:
            raise PlanError(
                f"plan: it is for MLPs in {tiles} tiles, and the model computes them in {actuator.mlp_tiles}; give the "
                f"model mlp_tiles={tiles}"
            )
        self._plan = plan
        self._saved_peak_bytes = saved_peak_bytes(plan, saved_alone(plan.problem.profile))
        actuator.apply(plan)

    @property
    def plan(self) -> ActivationPlan | None:
        """The given plan."""
        return self._plan

    def outcome(self) -> PlanOutcome | None:
        """Returns the plan's predictions; nothing is measured."""
        return PlanOutcome(
            phase="given",
            signature=self._plan.problem.profile.signature,
            plan=self._plan,
            predicted_peak_bytes=self._saved_peak_bytes,
        )


class FixedSetting(PlanSource):
    """No plan: device memory that the rest of training leaves free, within the budget, is used for earlier reloads."""

    def __init__(self, actuator: Actuator) -> None:
        self._actuator = actuator

    def before_forward(self, *, may_end: bool = True) -> None:
        """Between two forwards with nothing saved, sets how far reloads run ahead, from the last one's peak."""
        if self._actuator.idle:
            self._actuator.reload_ahead()
