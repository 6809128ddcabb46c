"""What a manager asks before its forwards: which plan is in force.

AutoPlan        measures and plans (memo.autoplan.controller)
FixedPlan       a plan that somebody made before
FixedSetting    one alpha for all; the device budget only bounds how far ahead is reloaded
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from memo.autoplan import PlanOutcome
from memo.errors import PlanError
from memo.mip.activation import (
    ActivationPlan,
    chunk_layers,
    extract_stage_plan,
    in_flight_within,
    read_activation_plan,
    require_valid,
)
from memo.mip.simulate import prove

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memo.autoplan import Actuator
    from memo.mip.activation import ActivationProblem
    from memo.parallel import PipelineOrder

__all__ = ["FixedPlan", "FixedSetting", "Planning", "checked_plan", "own_part", "read_plan"]


class Planning(Protocol):
    """Asked at each forward."""

    @property
    def plan(self) -> ActivationPlan | None:
        """In force now."""

    def before_forward(self) -> None:
        """A forward is about to begin."""

    def before_layer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A layer is about to run."""

    def use(self) -> PlanOutcome | None:
        """For a report."""


def checked_plan(problem: ActivationProblem) -> ActivationPlan:
    """Solved, checked against every rule, and played event by event.

    Raises:
        Infeasible: no plan fits; the message says what would.
        PlanInvalid: the simulation leaves a budget or the prediction: a bug of ours, found before the plan is used.
    """
    from memo.mip.activation import solve_problem  # runs that plan nothing need no solver

    plan = solve_problem(problem)
    prove(plan)
    return plan


def read_plan(plan: ActivationPlan | str | os.PathLike[str]) -> ActivationPlan:
    """A plan, or the file of one, that keeps every rule.

    Raises:
        PlanError: the file cannot be read or is no activation plan; or the plan breaks a rule, which is named.
    """
    if not isinstance(plan, ActivationPlan):
        plan = read_activation_plan(plan)
    require_valid(plan)
    return plan


def own_part(plan: ActivationPlan, course: PipelineOrder | None) -> ActivationPlan:
    """What this rank carries out of a plan: all of it, or the stage that its pipeline's schedule gives it.

    Raises:
        PlanError: the plan is for another pipeline, or for others or fewer microbatches in flight.
    """
    pipeline = plan.problem.pipeline
    if pipeline.stages == 1:
        return plan
    if course is None:
        raise PlanError(
            f"plan: it is for {pipeline.stages} pipeline stages, and no schedule says which of them is here"
        )
    stages = pipeline.stages * pipeline.chunks
    if course.stages != stages:
        raise PlanError(f"plan: it is for {stages} pipeline stages, and the schedule has {course.stages}")
    for stage in range(pipeline.stages):
        if pipeline.places(stage) == list(course.own):
            _require_room(plan, stage, course)
            return extract_stage_plan(plan, stage)
    raise PlanError(
        f"plan: it is for {pipeline.schedule}, which gives no rank stages {course.own}, as the schedule does"
    )


def _require_room(plan: ActivationPlan, stage: int, course: PipelineOrder) -> None:
    """The schedule holds no more at any time than the plan was made for."""
    pipeline = plan.problem.pipeline
    if pipeline.chunks == 1:
        held = pipeline.in_flight(stage)
        if course.held > held:
            raise PlanError(
                f"plan: it is for {held} microbatches in flight on stage {stage}, and the schedule holds {course.held}; "
                f"plan for its --schedule and --accumulate, or leave the planning to the run"
            )
        return
    sizes = tuple(len(chunk) for chunk in chunk_layers(plan.problem, stage))
    if course.turns is None or course.turns.layers != sizes:
        raise PlanError(f"plan: the stages of rank {stage} have {sizes} layers there, and others in the model")
    if not in_flight_within(course.turns.turns, pipeline.turns(stage), chunks=pipeline.chunks):
        raise PlanError(
            f"plan: it is for {pipeline.schedule} of {pipeline.microbatches} microbatches, and the schedule holds other "
            f"ones at a time; plan for its --schedule and --accumulate, or leave the planning to the run"
        )


class FixedPlan:
    """The same plan for every step; fractions hold at other lengths too, what they were chosen for may not.

    Raises:
        PlanError: the plan has more or fewer layers than the model, or computes their MLPs in other tiles.
    """

    def __init__(self, carrier: Actuator, plan: ActivationPlan) -> None:
        if len(plan.layers) != carrier.n_layers:
            raise PlanError(f"plan: it has {len(plan.layers)} layers and the model {carrier.n_layers}")
        tiles = plan.problem.profile.mlp_tiles
        if tiles != carrier.mlp_tiles:
            raise PlanError(
                f"plan: it is for MLPs in {tiles} tiles, and the model computes them in {carrier.mlp_tiles}; give the "
                f"model mlp_tiles={tiles}"
            )
        self._plan = plan
        carrier.use(plan)

    @property
    def plan(self) -> ActivationPlan | None:
        """The one given."""
        return self._plan

    def before_forward(self) -> None:
        """Nothing changes."""

    def before_layer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Nothing changes."""

    def use(self) -> PlanOutcome | None:
        """As it was made."""
        return PlanOutcome(
            phase="given",
            signature=self._plan.problem.profile.signature,
            plan=self._plan,
            measured_s=None,
            predicted_peak_bytes=self._plan.stages[0].peak_device_bytes,
            measured_peak_bytes=None,
            plans=1,
            planning_s=0.0,
            why_not=None,
        )


class FixedSetting:
    """No plan. What the device budget leaves beside everything else may be filled with reloads ahead of backward."""

    def __init__(self, carrier: Actuator) -> None:
        self._actuator = carrier

    @property
    def plan(self) -> ActivationPlan | None:
        """There is none."""
        return None

    def before_forward(self) -> None:
        """After each step it is known what the rest of training takes."""
        if self._actuator.idle:
            self._actuator.reload_ahead()

    def before_layer(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Nothing changes."""

    def use(self) -> PlanOutcome | None:
        """There is nothing to tell."""
        return None
