"""State of planning for a report: the plan in use, its predictions and what was measured."""

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
    """Snapshot of one manager's planning."""

    phase: str
    """Name of the phase in lower case, or "given" for a plan that was given."""
    signature: Signature | None
    """Batch shape that the plan is for."""
    plan: ActivationPlan | None
    """None: not made yet, or `why_not` says why there is none."""
    measured_s: float | None
    """Seconds of forward and backward; None before a planned step was measured."""
    predicted_peak_bytes: int
    """Predicted peak of saved tensors on the device."""
    measured_peak_bytes: int | None
    """Measured peak of saved tensors on the device; None before a planned step was measured."""
    plans: int
    """Number of batch shapes that have a plan."""
    planning_s: float
    """Host time spent planning since construction, in seconds."""
    why_not: str | None
    """Reason why there is no plan."""
    others_bytes: int = 0
    """Device memory in use for anything but saved tensors, whichever layer runs."""

    def lines(self) -> list[str]:
        """Formats the lines of the report."""
        if self.plan is None:
            return [f"plan: none yet (phase: {self.phase})" if self.why_not is None else f"plan: none: {self.why_not}"]
        stage = self.plan.stages[0]
        if self.plan.declined is not None:
            budget = self.plan.problem.budgets.device_bytes + self.others_bytes
            return [
                f"plan: nothing to move: {format_bytes(stage.peak_device_bytes + self.others_bytes)} of "
                f"{format_bytes(budget)} of device memory used at most, {format_bytes(self.predicted_peak_bytes)} of it "
                f"saved tensors"
            ]
        lines = [
            f"plan: forward and backward {format_duration(stage.microbatch_s)} predicted"
            + ("" if self.measured_s is None else f", {format_duration(self.measured_s)} measured")
            + f"; recompute {format_duration(stage.recompute_s)}, stalls {format_duration(stage.stall_s)} predicted; "
            f"saved tensors on the device at most {format_bytes(self.predicted_peak_bytes)} predicted"
            + ("" if self.measured_peak_bytes is None else f", {format_bytes(self.measured_peak_bytes)} measured")
        ]
        lines += [f"limited by: {reason}" for reason in self.plan.binding]
        return lines
