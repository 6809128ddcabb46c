"""What a manager did, as numbers and as a table for people."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.events import StallCause, Tier, UseKind
from memo.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memo.autoplan import PlanOutcome
    from memo.swap import Engine, TokenWise

__all__ = ["DiskUse", "Report", "TierUse", "TokenWiseUse"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """One tier's share."""

    tier: Tier
    moved_bytes: int
    """Bytes moved into the tier since construction; for the device, bytes that stayed until backward took them."""
    peak_bytes: int
    budget_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """What the scratch disk did, as the device saw it: whole blocks."""

    written_bytes: int
    read_bytes: int
    write_busy_s: float
    """Time during which at least one write was running; reads likewise."""
    read_busy_s: float
    elapsed_s: float
    """Since the manager was made."""

    @property
    def busy_s(self) -> float:
        """Time of writes plus time of reads."""
        return self.write_busy_s + self.read_busy_s

    @property
    def write_bytes_per_s(self) -> float:
        """While writing."""
        return self.written_bytes / self.write_busy_s if self.write_busy_s else 0.0

    @property
    def read_bytes_per_s(self) -> float:
        """While reading."""
        return self.read_bytes / self.read_busy_s if self.read_busy_s else 0.0

    @property
    def wear_bytes_per_day(self) -> float:
        """What a day at this rate would write: an SSD's endurance is given in terabytes written."""
        return self.written_bytes / self.elapsed_s * 86400 if self.elapsed_s else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenWiseUse:
    """What token-wise recompute did."""

    levels: str
    """How the tokens are divided."""
    accepted: int
    """Layers that swap a part of the tokens and compute the rest again."""
    repeated: dict[str, str]
    """Layers that run again whole, attention included, and why."""
    refused: dict[str, str]
    """Layers that swap whole tensors, and why."""
    deviation: float
    """Largest difference that any trial so far found between recomputed and saved, as a share of what is accepted; 0 is bit
    for bit."""
    recomputed_bytes: int
    recompute_s: float | None
    """None where the device's time is not measured."""

    @classmethod
    def of(cls, engine: Engine, tokenwise: TokenWise) -> TokenWiseUse | None:
        """None where all tensors are swapped whole anyway."""
        if tokenwise.is_idle:
            return None
        return cls(
            levels=tokenwise.described,
            accepted=len(tokenwise.deviation),
            repeated=dict(tokenwise.repeated),
            refused=dict(tokenwise.refused),
            deviation=tokenwise.worst_deviation,
            recomputed_bytes=engine.stats.bytes_recomputed,
            recompute_s=engine.stats.recompute_s,
        )

    def lines(self) -> list[str]:
        """For people: one line, and one for each reason with its layers."""
        exact = "bit for bit" if self.deviation == 0 else f"within {100 * self.deviation:.0f} % of the bound"
        told = [
            f"token-wise: {self.levels}, {self.accepted} layers ({exact}), recomputed "
            f"{format_bytes(self.recomputed_bytes)} in {_duration(self.recompute_s)}"
        ]
        told += _by_reason("recomputed whole, attention too", self.repeated)
        told += _by_reason("whole tensors", self.refused)
        return told


def _duration(seconds: float | None) -> str:
    return "a time that was not measured" if seconds is None else format_duration(seconds)


def _by_reason(what: str, layers: dict[str, str]) -> list[str]:
    """One line for each reason."""
    told = []
    for reason in dict.fromkeys(layers.values()):
        names = [name for name, why in layers.items() if why == reason]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        told.append(f"{what}: {names[0]}{others}: {reason}")
    return told


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A snapshot; `str()` is the table."""

    layers: int
    tiers: tuple[TierUse, ...]
    saved_tensors: int
    deduplicated: int
    kept_bytes: int
    """Bytes that stayed on the device because the plan says so."""
    reloaded_bytes: int
    uses: dict[UseKind, int]
    cancelled: int
    spilled: int
    failed_writes: int
    stalls_s: dict[StallCause, float]
    """Seconds that compute waited for copies, by cause, as far as they were measured."""
    untimed_waits: int
    """Waits whose time is unknown: a device's times are measured only for a trace or a plan."""
    live_entries: int
    tokenwise: TokenWiseUse | None = None
    disk: DiskUse | None
    plan: PlanOutcome | None = None

    @classmethod
    def of(
        cls,
        engine: Engine,
        *,
        layers: int,
        disk: DiskUse | None = None,
        tokenwise: TokenWise | None = None,
        plan: PlanOutcome | None = None,
    ) -> Report:
        """The state of `engine` now."""
        stats = engine.stats
        moved = {Tier.HOST: stats.bytes_host, Tier.DISK: stats.bytes_disk}
        return cls(
            layers=layers,
            tiers=(
                TierUse(
                    tier=Tier.DEVICE,
                    moved_bytes=stats.bytes_forwarded,
                    peak_bytes=stats.peak_device_bytes,
                    budget_bytes=None,
                ),
                *(
                    TierUse(
                        tier=tier.name, moved_bytes=moved[tier.name], peak_bytes=tier.peak, budget_bytes=tier.budget
                    )
                    for tier in engine.tiers
                ),
            ),
            saved_tensors=stats.packed,
            deduplicated=stats.deduplicated,
            kept_bytes=stats.bytes_kept,
            reloaded_bytes=stats.bytes_reloaded,
            uses=dict(stats.uses),
            cancelled=stats.cancelled,
            spilled=stats.spilled,
            failed_writes=stats.failed_writes,
            stalls_s={cause: ns / 1e9 for cause, ns in stats.stalls_ns.items()},
            untimed_waits=stats.untimed_waits,
            live_entries=stats.live_entries,
            tokenwise=None if tokenwise is None else TokenWiseUse.of(engine, tokenwise),
            disk=disk,
            plan=plan,
        )

    @property
    def overlap(self) -> float | None:
        """Share of the disk's busy time that nobody waited for; None without a disk, before its use, or if not measured."""
        if self.disk is None or self.disk.busy_s == 0 or self.untimed_waits:
            return None
        return max(0.0, 1 - sum(self.stalls_s.values()) / self.disk.busy_s)

    @property
    def prefetch_hits(self) -> float | None:
        """Share of the reloads that had been issued before backward asked; None when nothing was reloaded."""
        reloads = self.uses[UseKind.PREFETCHED] + self.uses[UseKind.FETCHED]
        return self.uses[UseKind.PREFETCHED] / reloads if reloads else None

    def __str__(self) -> str:
        rows = [("tier", "moved", "peak", "budget", "used")]
        for use in self.tiers:
            budget = "-" if use.budget_bytes is None else format_bytes(use.budget_bytes)
            share = "-" if not use.budget_bytes else f"{100 * use.peak_bytes / use.budget_bytes:.0f} %"
            rows.append((use.tier, format_bytes(use.moved_bytes), format_bytes(use.peak_bytes), budget, share))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        table = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        hits = self.prefetch_hits
        stalls = ", ".join(f"{cause} {format_duration(s)}" for cause, s in self.stalls_s.items() if s >= 5e-4) or "none"
        if self.untimed_waits:
            stalls = f"not measured on the device (a trace measures them), {stalls} on the host"
        lines = [
            f"{self.layers} layers, {self.saved_tensors} saved tensors ({self.deduplicated} shared a storage)",
            *table,
            f"reloaded {format_bytes(self.reloaded_bytes)}, prefetch hits "
            + ("-" if hits is None else f"{100 * hits:.1f} %")
            + f", forwarded {self.uses[UseKind.LIVE]}, cancelled {self.cancelled}, spilled {self.spilled}",
            f"stalls: {stalls}",
        ]
        if self.kept_bytes:
            lines.append(f"kept by plan: {format_bytes(self.kept_bytes)}")
        if self.disk is not None and self.disk.written_bytes:
            overlap = self.overlap
            lines.append(
                f"disk: write {format_bytes(self.disk.write_bytes_per_s)}/s, "
                f"read {format_bytes(self.disk.read_bytes_per_s)}/s, "
                + (f"{100 * overlap:.1f} % of its time hidden, " if overlap is not None else "")
                + f"wear {self.disk.wear_bytes_per_day / 1e12:.3g} TB written a day at this rate"
            )
        if self.failed_writes:
            lines.append(f"failed writes: {self.failed_writes} (their bytes went to another tier)")
        if self.plan is not None:
            lines += self.plan.lines()
        if self.tokenwise is not None:
            lines += self.tokenwise.lines()
        if self.live_entries:
            lines.append(f"still saved: {self.live_entries} storages")
        return "\n".join(lines)
