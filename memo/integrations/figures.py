"""Figures of a manager for a training loop's log: peaks since training began, and means of a step since the last ones."""

from __future__ import annotations

import dataclasses

import memo
from memo.swap import Totals

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """A manager's counters after a step."""

    step: int = 0
    host: int = 0
    """The most at one time, in bytes, as `disk`."""
    disk: int = 0
    totals: Totals = dataclasses.field(default_factory=Totals)
    progress: str = ""
    """State of planning; empty once planning has ended, or without planning."""

    @classmethod
    def of(cls, manager: memo.Manager, step: int) -> Counters:
        """Reads the counters after the step of that number."""
        report = manager.report()
        peaks = {str(use.tier): use.peak_bytes for use in report.tiers}
        return cls(
            step=step,
            host=peaks.get("host", 0),
            disk=peaks.get("disk", 0),
            totals=Totals.of(manager.stats),
            progress="" if report.plan is None else report.plan.progress,
        )

    def since(self, before: Counters, *, prefix: str) -> dict[str, float]:
        """Entries of a log: peaks since training began, and means of a step since `before`."""
        steps, added = self.step - before.step, self.totals.since(before.totals)
        figures = {
            "host_peak_gib": self.host / _GIB,
            "disk_peak_gib": self.disk / _GIB,
            "moved_gib_per_step": added.moved_bytes / _GIB / steps,
            "recomputed_gib_per_step": added.recomputed_bytes / _GIB / steps,
        }
        if added.stall_s is not None:
            figures["stall_ms_per_step"] = 1e3 * added.stall_s / steps
        return {f"{prefix}{name}": value for name, value in figures.items()}
