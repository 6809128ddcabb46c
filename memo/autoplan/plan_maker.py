"""Makes the plan of a measured profile: the problem, its solution on all ranks, and room for storages that move whole.

Owns how a plan is made; the controller owns when, and what becomes of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from memo.autoplan.limits import MEASURING
from memo.autoplan.profile_from_step import beside_layers
from memo.autoplan.step_evidence import least
from memo.errors import Infeasible, MemoError, PlanError
from memo.mip.activation import ActivationProblem, Budgets, LayerPlan, Pipeline, predict_stages
from memo.mip.inputs import ALL, ATTENTION, INPUT
from memo.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.autoplan.actuator import Actuator
    from memo.autoplan.plan_cache import CachedPlan
    from memo.autoplan.step_evidence import AllGather
    from memo.mip.activation import ActivationPlan, StagePrediction, StageTurns
    from memo.mip.inputs import Hardware

NEEDED = 1.04
"""The budget that is asked for as a multiple of what a plan needs: other steps held 0.5 to 2.6 % more."""
MOST_SOLVED = 3
"""Times that one plan is solved for again, since its storages need more room than their bytes."""


class PlanMaker:
    """Makes the plans of one manager.

    Args:
        actuator: has the budgets and margins.
        make_plan: solves a problem; returns a checked plan, or raises a MemoError.
        all_gather: collects a value from all ranks that must use the same plan.
        held: most microbatches in flight on this rank, by its pipeline's schedule; None: all of a step's.
        turns: order of forwards and backwards of this rank's pipeline stages, where it has several.
    """

    def __init__(
        self,
        actuator: Actuator,
        make_plan: Callable[[ActivationProblem], ActivationPlan],
        *,
        all_gather: AllGather,
        held: int | None,
        turns: StageTurns | None,
    ) -> None:
        self._actuator = actuator
        self._make_plan = make_plan
        self._all_gather = all_gather
        self._held = held
        self._turns = turns
        self._has_solved = False
        self.hardware: Hardware | None = None
        """Rates of the machine; None before a step was measured."""
        self.others_bytes = 0
        """Device memory beside saved tensors, as the last problem had it."""

    def make(self, cached: CachedPlan, *, growth: float, excess: int = 0) -> tuple[ActivationPlan, int, int]:
        """Returns a plan, the device memory that it leaves for all but saved tensors, and for what no step has shown yet.

        Args:
            cached: the entry, whose profile is known.
            growth: its tokens as a multiple of those of the step whose device memory was measured last.
            excess: bytes that the plan before took above the device's budget, which this one leaves free.

        Raises:
            MemoError: no plan fits, or it cannot be made.
        """
        if not self._has_solved:
            self._has_solved = True
            self._solve(self._problem(cached, growth)[0])  # a solver is loaded by its first use
        is_first = cached.plan is None
        unmeasured = max(self._all_gather(self._actuator.unmeasured_bytes(first=is_first, growth=growth)))
        problem, others_bytes = self._problem(cached, growth, excess=excess, unmeasured_bytes=unmeasured)
        answer = self._placed(problem)
        if isinstance(answer, Infeasible) and unmeasured:  # the step will show whether it needs them
            unmeasured = 0
            answer = self._placed(self._problem(cached, growth)[0])
        if isinstance(answer, Infeasible):
            from memo.mip.activation import DoesNotFit  # loads the solver, which has run

            others = f"{format_bytes(self.others_bytes)} for everything but saved tensors"
            known = answer.least_bytes.get("device") if isinstance(answer, DoesNotFit) else None
            if known is None or not isinstance(answer, DoesNotFit):
                raise PlanError(f"{answer}, beside {others}") from None
            fits = math.ceil((known + self.others_bytes + self._actuator.margin_bytes) * NEEDED)
            needs = f"device='{format_bytes(fits, up=True).replace(' ', '')}'"
            where = answer.memory.where
            raise PlanError(f"it needs {needs} or more: {where} takes {format_bytes(known)} beside {others}") from None
        if isinstance(answer, MemoError):
            raise answer
        return answer, others_bytes, unmeasured

    def _placed(self, problem: ActivationProblem) -> ActivationPlan | MemoError:
        """Solves for a plan whose storages have addresses in the host tier, and whose late ones have room on the device.

        That room, up to a layer's, may be worth more than the disk: the plan without it is taken where its step is shorter.
        """
        answer, room = self._fitted(problem), problem.budgets.device_bytes
        has_whole_room = not isinstance(answer, MemoError) and answer.problem.budgets.device_bytes == room
        if has_whole_room or not problem.budgets.disk_bytes:
            return answer
        without = self._fitted(_with_budgets(problem, disk_bytes=0))
        if isinstance(without, MemoError):
            return answer
        return without if isinstance(answer, MemoError) or without.step_s < answer.step_s else answer

    def _fitted(self, problem: ActivationProblem) -> ActivationPlan | MemoError:
        """Solves until what storages need more than bytes has room.

        The solver counts bytes. A storage moves whole, to one address, and to the disk at its own time: what that needs more
        is left free by the next solution. All ranks solve the same problem and use the first rank's answer: rounding may
        differ between machines.
        """
        room = problem.budgets.device_bytes
        for _ in range(MOST_SOLVED):
            answer = self._all_gather(self._solve(problem))[0]
            excess = late = 0
            if not isinstance(answer, MemoError):
                excess, late = self._actuator.host_excess(answer), self._actuator.late_bytes(answer)
            excess, late = max(self._all_gather(excess)), max(self._all_gather(late))
            budgets = problem.budgets
            late -= room - budgets.device_bytes
            if not excess and late <= 0:
                break
            problem = _with_budgets(
                problem,
                device_bytes=max(0, budgets.device_bytes - max(0, late)),
                host_bytes=max(0, budgets.host_bytes - excess),
            )
        return answer

    def _problem(
        self, cached: CachedPlan, growth: float, *, excess: int = 0, unmeasured_bytes: int = 0
    ) -> tuple[ActivationProblem, int]:
        """Returns the problem of an entry, and the most device memory that it leaves for all but saved tensors."""
        assert cached.profile is not None
        assert self.hardware is not None
        limits = least(self._all_gather(self._actuator.limits(growth)))
        if excess:
            cached.margin_bytes += max(0, excess - max(0, limits.others_bytes - cached.others_bytes))
        profile, self.others_bytes = beside_layers(cached.profile, limits)
        room = limits.device_bytes + limits.others_bytes - self.others_bytes
        problem = ActivationProblem(
            profile=profile,
            hardware=self.hardware,
            budgets=Budgets(
                device_bytes=max(0, room - cached.margin_bytes - unmeasured_bytes),
                host_bytes=max(0, limits.host_bytes - cached.host_margin_bytes),
                disk_bytes=max(0, limits.disk_bytes - cached.disk_margin_bytes),
            ),
            pipeline=self._pipeline(cached.calls),
        )
        return problem, limits.others_bytes

    def _pipeline(self, calls: int) -> Pipeline:
        if self._turns is not None and self._turns.microbatches == calls:
            return Pipeline(microbatches=calls, own=self._turns)
        return Pipeline(microbatches=calls, held=min(self._held or calls, calls))

    def _solve(self, problem: ActivationProblem) -> ActivationPlan | MemoError:
        try:
            return self._make_plan(problem)
        except MemoError as error:
            return error

    def fallback(self, cached: CachedPlan) -> StagePrediction | None:
        """Predicted step of the level that is used for want of a plan; None where no step was measured."""
        if cached.profile is None or self.hardware is None:
            return None
        known = cached.profile.layer_profiles()
        point = ATTENTION if cached.setting is MEASURING else INPUT
        layers = [LayerPlan(point=point if layer.point(point) else ALL, kept=0.0, host=1.0) for layer in known]
        layers[-1] = dataclasses.replace(layers[-1], kept=1.0, host=0.0)
        budgets = Budgets(device_bytes=0, host_bytes=1 << 60)
        problem = ActivationProblem(profile=cached.profile, hardware=self.hardware, budgets=budgets)
        return predict_stages(problem, layers)[0]


def _with_budgets(problem: ActivationProblem, **budgets: int) -> ActivationProblem:
    return dataclasses.replace(problem, budgets=dataclasses.replace(problem.budgets, **budgets))
