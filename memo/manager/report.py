"""Report of a Manager: bytes, times and counts since its construction; `str()` formats them for people.

Owns the snapshot and its wording; the engine owns the counters. Every line names its units.
"""

from __future__ import annotations

import dataclasses
import html
from types import MappingProxyType
from typing import TYPE_CHECKING

from memo.events import StallCause, TierName, UseKind
from memo.swap import SpillOutcome
from memo.units import format_bytes, format_duration, format_wear, text_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memo.autoplan import PlanOutcome
    from memo.swap import Engine, RecomputePolicy, SpillFigures

HELD_SHARE = 0.02
"""Held bytes are reported above this share of the saved bytes: the program always holds the first layer's input."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """Bytes of one tier."""

    tier: TierName
    moved_bytes: int
    """Moved into the tier since construction; for the device, bytes that backward used before a copy replaced them."""
    peak_bytes: int
    """The most at one time."""
    budget_bytes: int | None
    """None: no budget."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Traffic of the scratch disk, counted in whole blocks."""

    written_bytes: int
    read_bytes: int
    write_busy_s: float
    """Time during which at least one write ran."""
    read_busy_s: float
    """Time during which at least one read ran."""
    elapsed_s: float
    """Time since the manager was made."""

    @property
    def busy_s(self) -> float:
        """Sum of the busy times of writes and reads."""
        return self.write_busy_s + self.read_busy_s

    @property
    def write_bytes_per_s(self) -> float:
        """Rate of writes while at least one ran; 0 without writes."""
        return self.written_bytes / self.write_busy_s if self.write_busy_s else 0.0

    @property
    def read_bytes_per_s(self) -> float:
        """Rate of reads while at least one ran; 0 without reads."""
        return self.read_bytes / self.read_busy_s if self.read_busy_s else 0.0

    @property
    def wear_bytes_per_day(self) -> float:
        """Bytes written in a day at the average rate so far; an SSD's endurance is given in terabytes written."""
        return self.written_bytes / self.elapsed_s * 86400 if self.elapsed_s else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodecUse:
    """Values that moved as codes, by choice (`codec`)."""

    decoded_bytes: int
    """Bytes of the values."""
    moved_bytes: int
    """Bytes of their codes and scales."""
    exact: int
    """Storages that moved as they are, since a value was NaN, infinite or too large."""
    largest_error: float
    """Largest error as a share of the largest magnitude in the group of 128 values."""

    @classmethod
    def of(cls, engine: Engine) -> CodecUse | None:
        """Reads the counters; None where no storage was coded."""
        stats = engine.stats
        if not stats.bytes_coded and not stats.coded_exact:
            return None
        return cls(
            decoded_bytes=stats.bytes_coded,
            moved_bytes=stats.bytes_codes,
            exact=stats.coded_exact,
            largest_error=stats.largest_coded_error,
        )

    def line(self) -> str:
        """Formats one line."""
        return (
            f"codec: {format_bytes(self.decoded_bytes)} offloaded as {format_bytes(self.moved_bytes)}, largest error "
            f"{100 * self.largest_error:.2g} % of the largest of 128 values; "
            f"{self.exact} storages exact for a NaN or infinity"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeUse:
    """Recompute: the layers, their treatment and its cost."""

    levels: str
    """Setting of the layers, for people."""
    accepted: int
    """Number of layers of which a part is recomputed."""
    repeated: dict[str, str]
    """Layers of which all that can be is recomputed, attention included, and the reason of each."""
    refused: dict[str, str]
    """Layers of which nothing is recomputed though it should be, and the reason of each."""
    recomputed_bytes: int
    recompute_s: float | None
    """None: the device's time is not measured."""
    trials: int = 0
    """Replays that were tried out, to compare them with what was saved."""

    @classmethod
    def of(cls, engine: Engine, recompute_policy: RecomputePolicy) -> RecomputeUse | None:
        """Reads the counters; None where every tensor is moved whole by choice."""
        if recompute_policy.is_idle:
            return None
        return cls(
            levels=recompute_policy.described,
            accepted=len(recompute_policy.recomputed),
            repeated=dict(recompute_policy.repeated),
            refused=dict(recompute_policy.refused),
            recomputed_bytes=engine.stats.bytes_recomputed,
            recompute_s=engine.stats.recompute_s,
            trials=recompute_policy.trials_run,
        )

    def lines(self, layers: int) -> list[str]:
        """Formats one line for so many managed layers, and one more for each reason with its layers."""
        seconds = "time not measured" if self.recompute_s is None else format_duration(self.recompute_s)
        lines = [
            f"recompute ({self.levels}): a part of {self.accepted} of {layers} layers, bit for bit; "
            f"{format_bytes(self.recomputed_bytes)} and {seconds} in all"
        ]
        lines += _by_reason("recomputed whole, attention included", self.repeated)
        lines += _by_reason("offloaded as whole tensors", self.refused)
        return lines


def _lack_of_room(treatment: str, figures: SpillFigures | None) -> list[str]:
    """Formats one line of bytes that found no room; none where there were none."""
    if figures is None:
        return []
    worst = figures.worst
    return [
        f"{treatment} for lack of room: {format_bytes(figures.nbytes)} of {figures.layers} layers in {figures.steps} steps, "
        f"since the {worst.layer.full} tier was full; most in step {worst.step}, {format_bytes(worst.nbytes)}"
    ]


def _by_reason(treatment: str, layers: dict[str, str]) -> list[str]:
    """Formats one line for each reason."""
    lines = []
    for reason in dict.fromkeys(layers.values()):
        names = [name for name, why in layers.items() if why == reason]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"{treatment}: {names[0]}{others}: {reason}")
    return lines


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Snapshot of a manager's counters since its construction; `str()` formats it as a table and lines."""

    layers: int
    """Number of managed layers."""
    steps: int = 0
    """Steps that have begun since construction."""
    tiers: tuple[TierUse, ...] = ()
    """Device, host, disk; tiers that are off are left out."""
    saved_peak_bytes: int = 0
    """Most bytes of saved tensors at one time, wherever they were: what the device would have held without memo."""
    saved_tensors: int = 0
    """Tensors that autograd saved inside the manager."""
    deduplicated: int = 0
    """Number of these tensors whose storage had been saved already."""
    kept_bytes: int = 0
    """Bytes that stayed on the device by the plan."""
    reloaded_bytes: int = 0
    """Bytes copied back to the device."""
    uses: dict[UseKind, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(UseKind, 0))
    """Requests of backward, by where the bytes were."""
    cancelled: int = 0
    """Copies out that were cancelled before they began, because backward needed the bytes."""
    spilled: int = 0
    """Storages that went to a further tier because the first one was full."""
    failed_writes: int = 0
    """Disk writes that failed; their bytes went to another tier."""
    stalls_s: dict[StallCause, float] = dataclasses.field(default_factory=dict)
    """Seconds that compute waited for copies, by cause, as far as they were measured."""
    untimed_waits: int = 0
    """Waits of unknown duration: a device's times are measured only for a trace or a plan."""
    live_entries: int = 0
    """Storages whose backward is still to come."""
    spills: SpillFigures | None = None
    """Bytes that went to a further tier, the step with the most of them and its layer; None: none did."""
    stayed: SpillFigures | None = None
    """Bytes that stayed on the device since no tier had room."""
    recomputed_for_room: SpillFigures | None = None
    """Bytes that no tier had room for, so that their layers were recomputed whole."""
    recompute: RecomputeUse | None = None
    """None: no recompute."""
    coded: CodecUse | None = None
    """None: nothing moved as codes."""
    disk: DiskUse | None = None
    """None: no disk tier, or one whose traffic is not counted."""
    plan: PlanOutcome | None = None
    """None: a fixed `alpha` or fixed levels."""
    nothing: str | None = None
    """Reason why there is nothing to report."""
    held_bytes: int = 0
    """Most bytes of offloaded storages still on the device when a forward ended, since the program kept a reference."""
    unseen: dict[str, str] = dataclasses.field(default_factory=dict)
    """Layers that ran without their hooks, and the reason of each."""
    replaced: int = 0
    """Layers around which the program has activation checkpointing, in whose place the manager is."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        *,
        layers: int,
        steps: int = 0,
        disk: DiskUse | None = None,
        recompute_policy: RecomputePolicy | None = None,
        plan: PlanOutcome | None = None,
        unseen: Mapping[str, str] | None = None,
        replaced: int = 0,
        spills: Mapping[SpillOutcome, SpillFigures] = MappingProxyType({}),
    ) -> Report:
        """Reads the counters of `engine`."""
        stats, stayed = engine.stats, spills.get(SpillOutcome.STAYED)
        moved = {TierName.HOST: stats.bytes_host, TierName.DISK: stats.bytes_disk}
        return cls(
            layers=layers,
            steps=steps,
            tiers=(
                TierUse(
                    tier=TierName.DEVICE,
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
            saved_peak_bytes=stats.peak_saved_bytes,
            saved_tensors=stats.packed,
            deduplicated=stats.deduplicated,
            kept_bytes=stats.bytes_kept - (0 if stayed is None else stayed.nbytes),
            reloaded_bytes=stats.bytes_reloaded,
            uses=dict(stats.uses),
            cancelled=stats.cancelled,
            spilled=stats.spilled,
            failed_writes=stats.failed_writes,
            stalls_s={cause: ns / 1e9 for cause, ns in stats.stalls_ns.items()},
            untimed_waits=stats.untimed_waits,
            live_entries=stats.live_entries,
            held_bytes=stats.peak_held_bytes,
            recompute=None if recompute_policy is None else RecomputeUse.of(engine, recompute_policy),
            coded=CodecUse.of(engine),
            disk=disk,
            plan=plan,
            unseen=dict(unseen or {}),
            replaced=replaced,
            spills=spills.get(SpillOutcome.SPILLED),
            stayed=stayed,
            recomputed_for_room=spills.get(SpillOutcome.RECOMPUTED),
        )

    @property
    def benefit(self) -> str:
        """Benefit in words: bytes spared on the device, and their cost in time, measured or predicted."""
        if self.nothing is not None:
            return f"nothing is managed: {self.nothing}"
        if len(self.unseen) >= self.layers and not self._has_done_something:
            return f"not managed: {next(iter(self.unseen.values()))}"
        if not self.saved_tensors:
            return "nothing is managed yet: no forward has saved a tensor in the manager"
        peak, known = self.tiers[0].peak_bytes, "measured"
        plan = None if self.plan is None else self.plan.plan
        if self.plan is not None and plan is not None:
            measured = self.plan.measured_peak_bytes
            peak, known = (self.plan.predicted_peak_bytes, "predicted") if measured is None else (measured, known)
        if plan is not None and plan.declined is not None:
            return f"all saved tensors fit, {format_bytes(peak)} ({known}): nothing is moved or recomputed"
        return (
            f"saved tensors take at most {format_bytes(peak)} of the device ({known}) instead of "
            f"{format_bytes(self.saved_peak_bytes)}; {self._cost}"
        )

    @property
    def _has_done_something(self) -> bool:
        recomputed_bytes = 0 if self.recompute is None else self.recompute.recomputed_bytes
        return bool(self.kept_bytes or recomputed_bytes or any(use.moved_bytes for use in self.tiers[1:]))

    @property
    def _cost(self) -> str:
        """The time that it takes."""
        outcome = self.plan
        plan = None if outcome is None else outcome.plan
        stage = plan.stages[0] if plan is not None else None if outcome is None else outcome.fallback
        if outcome is None or stage is None:
            recompute_s = 0.0 if self.recompute is None else self.recompute.recompute_s
            if self.untimed_waits or recompute_s is None:
                has_failed = outcome is not None and outcome.why_not is not None
                return "time not measured (record a trace" + (")" if has_failed else ", or let it plan)")
            waited_s = sum(self.stalls_s.values())
            waited, recomputed = format_duration(waited_s), format_duration(recompute_s)
            return f"{waited} of waiting and {recomputed} of recompute so far (measured)"
        plain_s = stage.microbatch_s - stage.recompute_s - stage.stall_s
        if plain_s <= 0:
            return "step as long as without memo (predicted)"
        # Of two predictions: a measured step and a predicted plain one differ by what the prediction is off by, too.
        return f"step {100 * (stage.microbatch_s / plain_s - 1):+.1f} % (predicted)"

    @property
    def overlap(self) -> float | None:
        """Share of the disk's busy time that is hidden behind compute; None without a disk or timed stalls."""
        if self.disk is None or self.disk.busy_s == 0 or self.untimed_waits:
            return None
        return max(0.0, 1 - sum(self.stalls_s.values()) / self.disk.busy_s)

    @property
    def prefetch_hits(self) -> float | None:
        """Share of the reloads that were issued before backward asked for them; None if nothing was reloaded."""
        reloads = self.uses[UseKind.PREFETCHED] + self.uses[UseKind.FETCHED]
        return self.uses[UseKind.PREFETCHED] / reloads if reloads else None

    def __str__(self) -> str:
        return "\n".join((self.benefit, *self._lines()))

    def _repr_html_(self) -> str:
        """For notebooks: the benefit, and the rest as text."""
        rest = html.escape("\n".join(self._lines()))
        return f"<div><b>{html.escape(self.benefit)}</b><pre>{rest}</pre></div>"

    def _lines(self) -> list[str]:
        if self.nothing is not None:
            return []
        lines = [] if self.plan is None else self.plan.lines()
        if self.recompute is not None:
            lines += self.recompute.lines(self.layers)
            if self.saved_tensors and not (self.recompute.accepted or self.recompute.refused):
                lines.append(
                    "nothing to recompute: all that the layers save is made by compiled or other code that memo does not see"
                )
        if self.replaced:
            lines.append(f"in place of the program's activation checkpointing: {self.replaced} layers")
        lines += _by_reason("not managed", self.unseen)
        if self.held_bytes > HELD_SHARE * self.saved_peak_bytes:
            lines.append(
                f"offloaded but still on the device: up to {format_bytes(self.held_bytes)}, since the program keeps a "
                "reference; drop it before backward (use_cache, output_hidden_states, a list of layer outputs)"
            )
        return [*lines, *self._table(), *self._counters()]

    def _table(self) -> list[str]:
        """Peaks and budgets of the tiers, and what moved there, in all and in a step."""
        rows: list[tuple[str, ...]] = []
        for use in self.tiers:
            budget = "-" if use.budget_bytes is None else format_bytes(use.budget_bytes)
            share = "-" if not use.budget_bytes else f"{100 * use.peak_bytes / use.budget_bytes:.0f} %"
            moved = ["-", "-"]
            if use.tier is not TierName.DEVICE:
                a_step = format_bytes(use.moved_bytes // self.steps) if self.steps else "-"
                moved = [format_bytes(use.moved_bytes), a_step]
            rows.append((use.tier, format_bytes(use.peak_bytes), budget, share, *moved))
        return text_table(("tier", "peak", "budget", "used", "moved", "mean step"), rows).splitlines()

    def _counters(self) -> list[str]:
        hits = self.prefetch_hits
        stalls = ", ".join(f"{cause} {format_duration(s)}" for cause, s in self.stalls_s.items() if s >= 5e-4) or "none"
        if self.untimed_waits:
            stalls = f"not measured on the device (record a trace to measure them), {stalls} on the host"
        early = format_bytes(self.tiers[0].moved_bytes)
        lines = [
            f"{self.layers} layers{f', {self.steps} steps' if self.steps else ''}: {self.saved_tensors} tensors saved, "
            f"{self.deduplicated} of them in a shared storage; {format_bytes(self.kept_bytes)} kept on the device by plan",
            f"reloaded: {format_bytes(self.reloaded_bytes)}, prefetch hits "
            + ("-" if hits is None else f"{100 * hits:.1f} %")
            + f"; {early} in {self.uses[UseKind.LIVE]} storages used before their offload had ended, {self.cancelled} "
            f"copies cancelled, {self.spilled} spilled to the next tier",
            f"stalls: {stalls}",
        ]
        if self.spills is not None:
            worst = self.spills.worst
            lines.append(
                f"spilled: {format_bytes(self.spills.nbytes)} in {self.spills.steps} steps, most in step {worst.step}, "
                f"{format_bytes(worst.nbytes)}: {worst.layer}"
            )
        lines += _lack_of_room("stayed on the device", self.stayed)
        lines += _lack_of_room("recomputed whole", self.recomputed_for_room)
        if self.coded is not None:
            lines.append(self.coded.line())
        if self.disk is not None and self.disk.written_bytes:
            overlap = self.overlap
            lines.append(
                f"disk: write {format_bytes(self.disk.write_bytes_per_s)}/s, "
                f"read {format_bytes(self.disk.read_bytes_per_s)}/s, "
                + (f"{100 * overlap:.1f} % of its busy time hidden behind compute, " if overlap is not None else "")
                + f"writes {format_wear(self.disk.wear_bytes_per_day)}"
            )
        if self.failed_writes:
            lines.append(f"failed disk writes: {self.failed_writes} (their bytes went to another tier)")
        if self.live_entries:
            lines.append(f"still saved: {self.live_entries} storages, whose backward is to come")
        return lines
