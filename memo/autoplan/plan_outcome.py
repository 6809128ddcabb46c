"""What a report says of planning: the plan in force, and how far it held."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan
    from memo.mip.inputs import Signature

__all__ = ["PlanOutcome"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """One manager's planning, at one time."""

    phase: str
    signature: Signature | None
    plan: ActivationPlan | None
    measured_s: float | None
    """Of forward and backward; None before a planned step was measured."""
    predicted_peak_bytes: int
    """Of saved tensors, by the plan."""
    measured_peak_bytes: int | None
    plans: int
    """How many signatures have one."""
    planning_s: float
    """Host time spent planning, in all."""
    why_not: str | None
    """Why there is no plan."""
    others_bytes: int = 0
    """Of device memory, in use for everything but saved tensors, whichever layer runs."""

    def lines(self) -> list[str]:
        """For people."""
        if self.plan is None:
            return [f"plan: none yet ({self.phase})" if self.why_not is None else f"plan: none: {self.why_not}"]
        stage = self.plan.stages[0]
        if self.plan.declined is not None:
            used, budget = stage.peak_device_bytes, self.plan.problem.budgets.device_bytes
            fits = f"{format_bytes(used + self.others_bytes)} of {format_bytes(budget + self.others_bytes)}"
            return [f"plan: declined: fits in {fits}, {format_bytes(self.predicted_peak_bytes)} of it saved tensors"]
        told = [
            f"plan: forward and backward {format_duration(stage.microbatch_s)} predicted"
            + ("" if self.measured_s is None else f", {format_duration(self.measured_s)} measured")
            + f"; recompute {format_duration(stage.recompute_s)}, stalls {format_duration(stage.stall_s)}; activations at "
            f"most {format_bytes(self.predicted_peak_bytes)} on the device predicted"
            + ("" if self.measured_peak_bytes is None else f", {format_bytes(self.measured_peak_bytes)} measured")
        ]
        told += [f"because: {reason}" for reason in self.plan.binding]
        return told
