"""State of planning for a report: the plan in use, its predictions and what was measured."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.autoplan.limits import MEASURING
from memo.autoplan.step_evidence import NOTHING_SAVED
from memo.swap import Level
from memo.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan, StagePrediction
    from memo.mip.inputs import Signature


def describe_level(level: Level) -> str:
    """Says what every layer does at a level that is used for want of a plan."""
    if level is Level.SAVE_INPUT:
        return "every layer recomputes everything and offloads its input"
    return "every layer recomputes everything but attention and offloads the rest"


def describe_seconds(stage: StagePrediction) -> str:
    """Formats the predicted seconds of a step, their parts, and those of a step that keeps everything."""
    return (
        f"forward and backward {format_duration(stage.microbatch_s)} predicted, of which "
        f"{format_duration(stage.recompute_s)} is recompute and {format_duration(stage.stall_s)} stalls; "
        f"{format_duration(_kept_s(stage))} with everything kept"
    )


def _kept_s(stage: StagePrediction) -> float:
    return max(0.0, stage.microbatch_s - stage.recompute_s - stage.stall_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """Snapshot of one manager's planning."""

    phase: str
    """Name of the phase in lower case, or "given" for a plan that was given."""
    signature: Signature | None
    """Batch shape that the plan is for."""
    plan: ActivationPlan | None
    """None: not made yet, or `why_not` says why there is none."""
    measured_s: float | None = None
    """Seconds of forward and backward; None before a planned step was measured."""
    predicted_peak_bytes: int
    """Predicted peak of saved tensors on the device."""
    measured_peak_bytes: int | None = None
    """Measured peak of saved tensors on the device; None before a planned step was measured."""
    plans: int = 1
    """Number of batch shapes that have a plan."""
    why_not: str | None = None
    """Reason why there is no plan."""
    others_bytes: int = 0
    """Device memory in use for anything but saved tensors, whichever layer runs."""
    late_bytes: int = 0
    """Saved tensors on their way to the disk that the device may hold besides what the plan counts."""
    fallback: StagePrediction | None = None
    """Predicted step at `level`, where it is used for want of a plan; None: not known."""
    level: Level = MEASURING
    """Level of all layers without a plan."""
    progress: str = ""
    """Last message of planning, such as "step 1: the next step is the first by a plan, 5.86 s predicted"; empty at first."""

    def lines(self) -> list[str]:
        """Formats the lines of the report."""
        if self.plan is None and self.why_not is None:
            no_end = "no step has ended yet; optimizer.step(), zero_grad() or manager.step_done() ends one"
            return [f"plan: none yet ({self.progress or no_end})"]
        if self.plan is None and self.why_not == NOTHING_SAVED:
            return [f"plan: none: {self.why_not}"]
        if self.plan is None:
            seconds = "" if self.fallback is None else f": {describe_seconds(self.fallback)}"
            return [f"plan: none: {self.why_not}", f"{describe_level(self.level)}{seconds}"]
        stage = self.plan.stages[0]
        total = stage.peak_device_bytes + self.late_bytes + self.others_bytes
        saved = format_bytes(self.predicted_peak_bytes)
        if self.plan.declined is not None:
            most = f"all device memory at most {format_bytes(total)} predicted"
            return [f"plan: nothing to move: {most}, {saved} of it saved tensors"]
        seconds = f"forward and backward {format_duration(stage.microbatch_s)} predicted"
        if self.measured_s is not None:
            seconds += f", {format_duration(self.measured_s)} measured"
        seconds += f", {format_duration(_kept_s(stage))} with everything kept"
        parts = f"recompute {format_duration(stage.recompute_s)}, stalls {format_duration(stage.stall_s)} predicted"
        memory = f"saved tensors on the device at most {saved} predicted"
        if self.measured_peak_bytes is not None:
            memory += f", {format_bytes(self.measured_peak_bytes)} measured"
        if total > self.predicted_peak_bytes:
            memory += f"; all device memory at most {format_bytes(total)} predicted"
        limits = (f"limited by: {reason}" for reason in self.plan.binding)
        return [f"time: {seconds}; {parts}", f"memory: {memory}", *limits]
