"""The nouns of a simulation: the work of each layer that goes in, and what one step did, second by second, that comes out.

Pure data. `memo.mip.simulate.simulator` makes a Simulation, `memo.mip.simulate.trace_events` turns it into traces, and
nothing here
judges: a plan that does not fit has peaks above their budgets, and `overflows` names them. All times are seconds since
the step began, all bytes are of one rank.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

from memo.events import Lane, StallCause, TensorState, Tier, UseKind
from memo.mip.simulate.links import Copy

__all__ = [
    "EndWork",
    "LayerWork",
    "Occupancy",
    "Part",
    "Peak",
    "Simulation",
    "Span",
    "StageSimulation",
    "Transition",
    "Usage",
    "Wait",
]


class Part(enum.IntEnum):
    """What becomes of a share of the bytes that a layer saves."""

    KEPT = 0
    HOST = 1
    DISK = 2
    RECOMPUTED = 3
    """Dropped with the layer's sources and computed again in backward."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One layer as a plan leaves it: how long it computes, and what becomes of what it saves."""

    name: str
    forward_s: float
    backward_s: float
    """Without recompute."""
    recompute_s: float = 0.0
    nbytes: Mapping[Part, int]
    """Of what autograd saves and what a recompute is given; together all of it, as it is while the layer's forward runs."""
    forward_transient_nbytes: int = 0
    """The most that its forward holds beside what it saves."""
    backward_transient_nbytes: int = 0
    between_nbytes: int = 0
    """Gradients that wait between the halves of its backward."""

    def of(self, part: Part) -> int:
        return self.nbytes.get(part, 0)

    @property
    def saved_nbytes(self) -> int:
        """All that the layer's forward leaves behind until its copies are made."""
        return sum(self.nbytes.values())

    @property
    def moved_nbytes(self) -> int:
        """What goes to other tiers."""
        return self.of(Part.HOST) + self.of(Part.DISK)

    @property
    def dropped_nbytes(self) -> int:
        """What the device gives up once the copies are made, and must have room for again before backward."""
        return self.saved_nbytes - self.of(Part.KEPT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndWork:
    """What stands before the first layer (embedding) or behind the last one (norm, projection, loss); it never moves."""

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_nbytes: int = 0
    """Held from the end's forward to the end of its backward."""
    transient_nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The compute stream at work."""

    lane: Lane
    module: str
    phase: str
    """`forward`, `backward` or `optimizer`."""
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The compute stream idle: a layer's copies had not ended when its buffer, or its bytes, were needed."""

    cause: StallCause
    call: int
    module: str
    lane: Lane
    """The one that was behind."""
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One part of what a layer's call saved changes state, as a saved storage would."""

    t_s: float
    call: int
    module: str
    part: Part
    to: TensorState
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Backward asks for a part."""

    t_s: float
    call: int
    part: Part
    how: UseKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """From `t_s` on a tier holds `nbytes` in all."""

    t_s: float
    tier: Tier
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most a tier held, and when."""

    tier: Tier
    nbytes: int
    t_s: float
    where: str
    """What the compute stream was at, such as `layers.3 forward`."""
    budget_nbytes: int | None
    """None is without limit."""

    @property
    def over_nbytes(self) -> int:
        """Bytes beyond the budget; 0 within it."""
        return 0 if self.budget_nbytes is None else max(0, self.nbytes - self.budget_nbytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSimulation:
    """What one rank of one pipeline stage did in a step."""

    end_s: float
    """When its last work ended."""
    spans: tuple[Span, ...]
    waits: tuple[Wait, ...]
    copies: tuple[Copy, ...]
    transitions: tuple[Transition, ...]
    usages: tuple[Usage, ...]
    occupancies: tuple[Occupancy, ...]
    """By time; of several of one tier at one instant the last one counts."""
    peaks: tuple[Peak, ...]
    """One for each tier."""

    @property
    def compute_s(self) -> float:
        """Without recompute."""
        return math.fsum(span.seconds for span in self.spans if span.lane is Lane.COMPUTE)

    @property
    def recompute_s(self) -> float:
        return math.fsum(span.seconds for span in self.spans if span.lane is Lane.RECOMPUTE)

    @property
    def stall_s(self) -> float:
        return math.fsum(wait.seconds for wait in self.waits)

    @property
    def idle_s(self) -> float:
        """Neither at work nor waiting for a copy: the pipeline's bubble."""
        return max(0.0, self.end_s - self.compute_s - self.recompute_s - self.stall_s)

    def peak(self, tier: Tier) -> Peak:
        return next(peak for peak in self.peaks if peak.tier is tier)

    def moved_nbytes(self, lane: Lane) -> int:
        """Bytes that crossed a copy lane."""
        return sum(copy.nbytes for copy in self.copies if lane in copy.queue.lanes)

    def stalls(self) -> dict[tuple[StallCause, Lane], float]:
        """Seconds by cause and by the lane that was behind, the largest first."""
        found: dict[tuple[StallCause, Lane], float] = {}
        for wait in self.waits:
            key = (wait.cause, wait.lane)
            found[key] = found.get(key, 0.0) + wait.seconds
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One step, a rank of each pipeline stage."""

    step_s: float
    stages: tuple[StageSimulation, ...]

    @property
    def overflows(self) -> tuple[tuple[int, Peak], ...]:
        """Stage and tier where the step breaks a budget; empty when the plan fits."""
        return tuple(
            (number, peak) for number, stage in enumerate(self.stages) for peak in stage.peaks if peak.over_nbytes
        )

    @property
    def slowest(self) -> int:
        """The stage that works and waits longest, which the others wait for; of equal ones the first."""
        busy = [stage.compute_s + stage.recompute_s + stage.stall_s for stage in self.stages]
        return busy.index(max(busy))
