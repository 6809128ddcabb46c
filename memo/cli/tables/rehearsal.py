"""Lines and JSON of a rehearsal, for `memo rehearse`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from memo.events import TierName
from memo.units import format_bytes, format_duration, format_tokens, parse_bytes, text_table

if TYPE_CHECKING:
    from memo.rehearsal import Rehearsal, RehearsedPipeline, RehearsedStep

_NEEDED = re.compile("it needs device='([^']+)' or more")
"""The planner's words where no plan fits."""
SHOWN_S = 0.0005
"""Seconds that are not rounded to 0 ms."""


def step_line(step: RehearsedStep, device_budget: int, *, before: str = "") -> str:
    """One line for a step that has ended.

    Args:
        step: the step.
        device_budget: in bytes.
        before: the decision of the step before; the same one is cut to its first word.
    """
    decision = step.decision if step.decision != before else step.decision.split(":")[0]
    tokens = f"{format_tokens(step.tokens)} tokens" if step.tokens else ""
    parts = [
        f"step {step.number:2}",
        tokens,
        format_duration(step.seconds),
        f"device peak {format_bytes(step.device_bytes)} of {format_bytes(device_budget)}",
        f"host peak {format_bytes(step.host_bytes)}" if step.host_bytes else "",
        f"disk peak {format_bytes(step.disk_bytes)}" if step.disk_bytes else "",
        f"offloaded {format_bytes(step.moved_bytes)}" if step.moved_bytes else "",
        f"recompute {format_duration(step.recompute_s)}" if step.recompute_s >= SHOWN_S else "",
        f"stall {format_duration(step.stall_s)}" if step.stall_s >= SHOWN_S else "",
        f"{step.trials} trials" if step.trials else "",
        decision,
    ]
    return "  ".join(filter(None, parts))


def settled_line(found: Rehearsal) -> str:
    """The last line: when the plan had settled, and what the steps before it cost."""
    after, settling_s = found.settled_after, found.settling_s
    if after is None or settling_s is None or found.step_s is None:
        return f"not settled after {len(found.steps)} steps"
    by_tokens = {step.tokens: step.seconds for step in found.steps}
    if len(by_tokens) == 1:
        pace = f"{format_duration(found.step_s)} a step"
    else:
        times = [f"{format_duration(s)} at {format_tokens(tokens)}" for tokens, s in sorted(by_tokens.items())]
        pace = f"{', '.join(times)} tokens"
    if not after:
        return f"settled from the first step on with {pace}"
    steps = sum(by_tokens.values()) / len(by_tokens)
    return (
        f"settled after {after} steps with {pace}; the first {after} took {max(0.0, settling_s / steps):.1f} plain steps "
        "beyond their own"
    )


def what_would_fit(found: Rehearsal, *, most_device: int) -> str | None:
    """One sentence on a training that does not fit: tier, step, bytes and what would fit; None where it fits.

    Args:
        found: the rehearsal.
        most_device: the GPU's largest device budget, in bytes.
    """
    if found.failure is not None and not found.static_bytes:
        return (
            f"the model and its optimizer do not fit: {found.failure} It needs a GPU with more memory, or fewer trained "
            "parameters"
        )
    if found.failure is not None:
        last = next((step.decision for step in reversed(found.steps) if step.decision), "")
        planned = f"; planning: {last}" if "it needs device=" in last or "no plan fits" in last else ""
        return f"step {len(found.steps)} does not fit: {found.failure}{planned}"
    parts = []
    for tier in TierName:
        over = [one for one in found.violations if one.tier is tier]
        if over:
            worst = max(over, key=lambda one: one.used_bytes)
            needed = worst.used_bytes
            if tier is TierName.DEVICE and (asked := _NEEDED.search(found.report)) is not None:
                needed = max(needed, parse_bytes(asked[1]))
            others = f", and {len(over) - 1} more steps exceeded it" if len(over) > 1 else ""
            size = format_bytes(needed, up=True).replace(" ", "")
            flag = f"--{tier}-budget" if tier is TierName.DISK else f"--{tier}"
            cure = f"{flag} {size}"
            if tier is TierName.DEVICE and needed > most_device:
                cure = "a GPU with more memory"
            parts.append(f"{worst}{others}; it needs {cure}, or fewer tokens")
    return "; ".join(parts) or None


def pipeline_table(found: RehearsedPipeline) -> str:
    """A row for each stage, and the step of all."""
    rows = [
        (
            str(number),
            f"{format_bytes(max((step.device_bytes for step in stage.steps), default=0))} of "
            f"{format_bytes(stage.device_budget)}",
            f"{format_bytes(stage.steps[-1].host_bytes if stage.steps else 0)} of {format_bytes(stage.host_budget)}",
            "-" if stage.usual_step is None else format_bytes(stage.usual_step.moved_bytes),
            "-" if stage.usual_step is None else format_duration(stage.usual_step.recompute_s),
            "-" if stage.step_s is None else format_duration(stage.step_s),
            "-" if stage.settled_after is None else f"{stage.settled_after} steps",
        )
        for number, stage in enumerate(found.stages)
    ]
    head = ("stage", "device peak", "host peak", "offloaded", "recompute", "alone", "settled after")
    pipeline = found.pipeline
    order = f"{pipeline.stages} stages, {pipeline.schedule}, {pipeline.microbatches} microbatches"
    pace = "no step of all stages" if found.step_s is None else f"{format_duration(found.step_s)} a step"
    return f"{text_table(head, rows)}\n{order}: {pace}"


def pipeline_summary(found: RehearsedPipeline) -> dict[str, Any]:
    """Object that `--json` prints for a pipeline."""
    return {
        "fits": found.fits,
        "settled_after_steps": found.settled_after,
        "step_s": found.step_s,
        "schedule": str(found.pipeline.schedule),
        "microbatches": found.pipeline.microbatches,
        "stages": [rehearsal_summary(stage) | _turns(stage.usual_step) for stage in found.stages],
    }


def _turns(step: RehearsedStep | None) -> dict[str, Any]:
    """Mean seconds of a step's turns by chunk and kind, as 0F, and those after the last one."""
    times = None if step is None else step.times
    if times is None:
        return {}
    turns_s = {f"{chunk}{kind}": seconds for (chunk, kind), seconds in times.turns_s.items()}
    return {"turns_s": turns_s, "sync_s": times.sync_s}


def rehearsal_summary(found: Rehearsal) -> dict[str, Any]:
    """Object that `--json` prints."""
    return {
        "fits": found.fits,
        "settled": found.settled,
        "settled_after_steps": found.settled_after,
        "step_s": found.step_s,
        "settling_s": found.settling_s,
        "static_nbytes": found.static_bytes,
        "optimizer_host_nbytes": found.optimizer_host_bytes,
        "device_budget_nbytes": found.device_budget,
        "host_budget_nbytes": found.host_budget,
        "disk_budget_nbytes": found.disk_budget,
        "failure": found.failure,
        "violations": [
            {
                "step": one.step,
                "tier": str(one.tier),
                "used_nbytes": one.used_bytes,
                "budget_nbytes": one.budget_bytes,
            }
            for one in found.violations
        ],
        "warnings": list(found.warned),
        "took_s": found.took_s,
        "report": found.report,
        "steps": [
            {
                "step": step.number,
                "tokens": step.tokens or None,
                "seconds_s": step.seconds,
                "device_peak_nbytes": step.device_bytes,
                "host_peak_nbytes": step.host_bytes,
                "disk_peak_nbytes": step.disk_bytes,
                "moved_nbytes": step.moved_bytes,
                "recompute_s": step.recompute_s,
                "stall_s": step.stall_s,
                "trials": step.trials,
                "settled": step.is_settled,
                "decision": step.decision,
            }
            for step in found.steps
        ],
    }
