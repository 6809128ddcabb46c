"""Data types of the statistics: figures of a lane, a stall cause, a tier, a layer, a step, a rank.

Pure data, computed by `memo.trace.stats` and defined by docs/trace-format.md. The unit is in the name, and the JSON of
a figure has the same keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from memo.events import Lane, StallCause, TierName


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneStats:
    """Figures of one copy lane."""

    lane: Lane
    copies: int
    nbytes: int
    busy_ns: int
    hidden_ns: int
    forward_busy_percent: float | None
    backward_busy_percent: float | None
    bytes_per_s: float | None
    queue_nbytes: int
    """Most bytes at one time whose copy was issued and had not ended."""
    link_bytes_per_s: float | None
    """Rate of the link measured alone; None where the header has none, or copies were faster than that."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StallStats:
    """Stalls of one cause."""

    cause: StallCause
    count: int
    total_ns: int
    longest_ns: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchStats:
    """Numbers of uses in backward, by how the storage was found."""

    prefetched: int
    fetched: int
    live: int
    late: int
    """Prefetched, but waited for."""
    hit_percent: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierPeak:
    """Peak of a tier."""

    tier: TierName
    saved_nbytes: int
    """Peak of saved storages, replayed from their states."""
    at_ns: int
    measured_nbytes: int | None
    """Peak of everything in the tier, where the run measured it."""
    budget_nbytes: int | None
    predicted_nbytes: int | None
    """The plan's prediction of `saved_nbytes`."""

    @property
    def used_nbytes(self) -> int:
        """Bytes that count against the budget: all of the device, but only memo's part of the lower tiers."""
        measured = self.measured_nbytes if self.tier is TierName.DEVICE else None
        return self.saved_nbytes if measured is None else max(measured, self.saved_nbytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Time and traffic that one layer costs."""

    layer: str
    stall_ns: int
    recompute_ns: int
    moved_nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of one step of one rank, or of the whole trace where `step` is None."""

    rank: int
    step: int | None
    complete: bool
    """Whether the trace has its begin and end."""
    start_ns: int
    duration_ns: int
    forward_ns: int
    backward_ns: int
    compute_ns: int
    recompute_ns: int
    stall_ns: int
    """Time in which at least one stall was open, without waits for collectives."""
    communication_ns: int
    """Time in which compute waited for collectives."""
    added_ns: int
    added_percent: float | None
    """Added time in percent of the step without it."""
    copy_ns: int
    hidden_ns: int
    overlap_percent: float | None
    lanes: tuple[LaneStats, ...]
    stalls: tuple[StallStats, ...]
    prefetch: PrefetchStats
    peaks: tuple[TierPeak, ...]
    worst_layers: tuple[LayerCost, ...]

    @property
    def end_ns(self) -> int:
        """Time at which the step ended."""
        return self.start_ns + self.duration_ns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """Figures of one rank, by step and in total."""

    rank: int
    steps: tuple[StepStats, ...]
    total: StepStats


def to_json(value: object) -> Any:
    """Converts figures to JSON values; keys are the fields' names, with their units."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
