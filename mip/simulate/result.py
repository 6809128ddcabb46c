"""Data types of a simulation: the work of each layer as input, and the events of one step as output.

Pure data, made by `memo.mip.activation.simulator` and turned into traces by `memo.mip.simulate.trace_events`. A plan that
does not fit has peaks above their budgets, which `overflows` names. Times are seconds since the step began; bytes are
of one rank.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Literal

from memo.events import Lane, StallCause, TensorState, TierName, UseKind
from memo.mip.simulate.links import Copy

Phase = Literal["forward", "backward", "optimizer"]


class Part(enum.IntEnum):
    """Part of a layer's saved bytes, by what happens to it."""

    KEPT = 0
    HOST = 1
    DISK = 2
    RECOMPUTED = 3
    """Dropped, and recomputed in backward."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Times of one layer, and its saved bytes by part, under a plan."""

    name: str
    forward_s: float
    backward_s: float
    """Without recompute."""
    recompute_s: float = 0.0
    decode_s: float = 0.0
    """Decoding of what has come back, before each backward that reads it."""
    forward_exchange_s: float = 0.0
    """The part of `forward_s` in collectives that compute waits for."""
    backward_exchange_s: float = 0.0
    gather_s: float = 0.0
    """Collective that must end before each pass of the layer begins."""
    reduce_s: float = 0.0
    """Collective that follows its backward."""
    sync_s: float = 0.0
    """Collective that follows its last backward of a step."""
    nbytes: Mapping[Part, int]
    """Bytes of each part: all that autograd saves and a recompute is given, as present while the layer's forward runs."""
    tier_nbytes: Mapping[Part, int] = dataclasses.field(default_factory=dict)
    """Bytes in lower tiers: of parts that move, their bytes as codes; of others, those of `nbytes`."""
    forward_transient_nbytes: int = 0
    """Peak bytes of its forward beside what it saves."""
    backward_transient_nbytes: int = 0
    """Peak bytes of its backward beside what its forward saved."""
    recompute_held_nbytes: int = 0
    """Further bytes while it recomputes: of a split backward, in the first half."""
    absent_nbytes: int = 0
    """Bytes of all that autograd saved that are not there at the peak of a backward in one piece."""
    between_nbytes: int = 0
    """Gradients held between the halves of its backward."""

    def of(self, part: Part) -> int:
        """Bytes of one part."""
        return self.nbytes.get(part, 0)

    def in_tier(self, part: Part) -> int:
        """Bytes of one part on links and in its tier."""
        return self.tier_nbytes.get(part, self.of(part))

    @property
    def saved_nbytes(self) -> int:
        """Bytes that the layer's forward leaves on the device until its copies have ended."""
        return sum(self.nbytes.values())

    @property
    def moved_nbytes(self) -> int:
        """Bytes that go to other tiers."""
        return self.of(Part.HOST) + self.of(Part.DISK)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndWork:
    """Work of the embedding, or of the head (norm, projection, loss), whose saved bytes never move."""

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_exchange_s: float = 0.0
    """The part of `forward_s` in collectives that compute waits for."""
    backward_exchange_s: float = 0.0
    sync_s: float = 0.0
    """Collective that follows its last backward of a step."""
    saved_nbytes: int = 0
    """Held from the end's forward to the end of its backward."""
    transient_nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSpan:
    """Work of the compute stream, or a collective."""

    lane: Lane
    module: str
    phase: Phase
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Stall of the compute stream: a layer's copies, or a collective, had not ended when it needed their result."""

    cause: StallCause
    module: str
    lane: Lane
    """The lane that was late."""
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Change of state of one part of a call's saved bytes, as of a saved storage."""

    t_s: float
    call: int
    module: str
    part: Part
    to: TensorState
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Use of a part by backward."""

    t_s: float
    call: int
    part: Part
    how: UseKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Bytes in a tier from `t_s` on."""

    t_s: float
    tier: TierName
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak of a tier."""

    tier: TierName
    nbytes: int
    t_s: float
    where: str
    """Work of the compute stream at that time, such as `layers.3 forward`."""
    budget_nbytes: int | None
    """None: no limit."""

    @property
    def over_nbytes(self) -> int:
        """Bytes beyond the budget; 0 within it."""
        return 0 if self.budget_nbytes is None else max(0, self.nbytes - self.budget_nbytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSimulation:
    """Events of one rank of one pipeline stage in a step."""

    end_s: float
    """End of its last work."""
    spans: tuple[SimulatedSpan, ...]
    waits: tuple[Wait, ...]
    copies: tuple[Copy, ...]
    transitions: tuple[Transition, ...]
    usages: tuple[Usage, ...]
    occupancies: tuple[Occupancy, ...]
    """In order of time; of several for one tier at one instant the last one counts."""
    peaks: tuple[Peak, ...]
    """One for each tier."""
    static_nbytes: int = 0
    """Bytes of parameters, gradients and optimizer state, on the device throughout."""

    @property
    def compute_s(self) -> float:
        """Time of compute without recompute."""
        return math.fsum(span.seconds for span in self.spans if span.lane is Lane.COMPUTE)

    @property
    def recompute_s(self) -> float:
        """Time of recompute."""
        return math.fsum(span.seconds for span in self.spans if span.lane is Lane.RECOMPUTE)

    @property
    def stall_s(self) -> float:
        """Time that compute waited for copies."""
        return math.fsum(wait.seconds for wait in self.waits if wait.cause is not StallCause.COLLECTIVE)

    @property
    def communication_s(self) -> float:
        """Time that compute waited for collectives."""
        return math.fsum(wait.seconds for wait in self.waits if wait.cause is StallCause.COLLECTIVE)

    def peak(self, tier: TierName) -> Peak:
        """Peak of one tier."""
        return next(peak for peak in self.peaks if peak.tier is tier)

    def moved_nbytes(self, lane: Lane) -> int:
        """Bytes that crossed a lane."""
        return sum(copy.nbytes for copy in self.copies if lane in copy.queue.lanes)

    def stalls(self) -> dict[tuple[StallCause, Lane], float]:
        """Stall seconds by cause and late lane, the largest first; waits for collectives are none."""
        found: dict[tuple[StallCause, Lane], float] = {}
        for wait in self.waits:
            if wait.cause is StallCause.COLLECTIVE:
                continue
            key = (wait.cause, wait.lane)
            found[key] = found.get(key, 0.0) + wait.seconds
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One step, with one rank of each pipeline stage."""

    step_s: float
    stages: tuple[StageSimulation, ...]
    rest_s: float = 0.0
    """Predicted seconds of a longer step's further microbatches, which were not played."""

    @property
    def whole_step_s(self) -> float:
        """Seconds of the step, with the microbatches that were not played."""
        return self.step_s + self.rest_s

    @property
    def overflows(self) -> tuple[tuple[int, Peak], ...]:
        """(stage, peak) wherever the step exceeds a budget; empty when the plan fits."""
        return tuple(
            (number, peak) for number, stage in enumerate(self.stages) for peak in stage.peaks if peak.over_nbytes
        )

    @property
    def slowest(self) -> int:
        """The stage with the most work and stalls, for which the others wait; of equal ones the first."""
        busy = [stage.compute_s + stage.communication_s + stage.recompute_s + stage.stall_s for stage in self.stages]
        return busy.index(max(busy))
