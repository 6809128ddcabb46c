"""Figures of a manager for a training loop's log: peaks since training began, and means of a step since the last ones."""

from __future__ import annotations

import dataclasses

import memo

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """A manager's counters after a step."""

    step: int = 0
    host: int = 0
    """The most at one time, in bytes, as `disk`."""
    disk: int = 0
    moved: int = 0
    """Bytes so far, as `recomputed`."""
    recomputed: int = 0
    stalled_s: float | None = 0.0
    """None: not measured."""
    progress: str = ""
    """State of planning; empty once planning has ended, or without planning."""

    @classmethod
    def of(cls, manager: memo.Manager, step: int) -> Counters:
        """Reads the counters after the step of that number."""
        report = manager.report()
        lower = {use.tier: use for use in report.tiers[1:]}
        peaks = {str(tier): use.peak_bytes for tier, use in lower.items()}
        return cls(
            step=step,
            host=peaks.get("host", 0),
            disk=peaks.get("disk", 0),
            moved=sum(use.moved_bytes for use in lower.values()),
            recomputed=manager.stats.bytes_recomputed,
            stalled_s=None if report.untimed_waits else sum(report.stalls_s.values()),
            progress="" if report.plan is None else report.plan.progress,
        )

    def since(self, before: Counters, *, prefix: str) -> dict[str, float]:
        """Entries of a log: peaks since training began, and means of a step since `before`."""
        steps = self.step - before.step
        figures = {
            "host_peak_gib": self.host / _GIB,
            "disk_peak_gib": self.disk / _GIB,
            "moved_gib_per_step": (self.moved - before.moved) / _GIB / steps,
            "recomputed_gib_per_step": (self.recomputed - before.recomputed) / _GIB / steps,
        }
        if self.stalled_s is not None and before.stalled_s is not None:
            figures["stall_ms_per_step"] = 1e3 * (self.stalled_s - before.stalled_s) / steps
        return {f"{prefix}{name}": value for name, value in figures.items()}
