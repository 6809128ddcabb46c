"""Which plan a batch's shape gets: its own, that of a slightly larger one, or a new one that the shapes to come can share.

Owns the shapes that a run has shown and what planning knows of each; it makes no plan (memo.autoplan.controller does).
Batches padded to their longest sequence have a new length each step, and a plan for each of them would be made and
never be used again:

    first shape          measured and planned exactly: runs of one length have the best plan there is
    a smaller one        runs by a plan for at most an eighth more tokens: its fractions hold, and fewer bytes are kept
    another              planned for its length rounded up, eight lengths to an octave

A plan is never used for more tokens than it was made for.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from typing import TYPE_CHECKING

from memo.autoplan.actuator_protocol import MEASURING, Setting
from memo.mip.inputs import Role, Signature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.mip.activation import ActivationPlan
    from memo.mip.inputs import Profile

__all__ = ["CachedPlan", "Phase", "PlanCache", "growth", "joint"]

MAX_PLANS = 32
"""Signatures whose plans are kept; the one not used for longest goes."""
LENGTHS_PER_OCTAVE = 8


class Phase(enum.Enum):
    WARM_UP = enum.auto()
    MIXED = enum.auto()
    PROFILING = enum.auto()
    PLANNED = enum.auto()
    """The plan's first step."""
    COMPARING = enum.auto()
    SETTLED = enum.auto()

    @property
    def measures(self) -> bool:
        return self in (Phase.PROFILING, Phase.COMPARING)

    @property
    def precedes_plan(self) -> bool:
        return self in (Phase.WARM_UP, Phase.MIXED, Phase.PROFILING)


@dataclasses.dataclass(slots=True)
class CachedPlan:
    """One signature's state."""

    phase: Phase = Phase.WARM_UP
    setting: ActivationPlan | Setting = MEASURING
    profile: Profile | None = None
    corrections: int = 0
    calls: int = 1
    """How often a step runs each layer: its microbatches."""
    margin_bytes: int = 0
    """By how much a measured peak was above its prediction: whole storages are kept where fractions were planned."""
    predicted_peak_bytes: int = 0
    """Of saved tensors, by the plan."""
    step_off: float | None = None
    peak_off: float | None = None
    measured_s: float | None = None
    measured_peak_bytes: int | None = None

    @property
    def plan(self) -> ActivationPlan | None:
        return None if isinstance(self.setting, Setting) else self.setting

    def planned(self, plan: ActivationPlan) -> None:
        """Another plan is to be tried, unless it does nothing at all."""
        self.setting = plan
        self.phase = Phase.PLANNED if plan.declined is None else Phase.SETTLED


class PlanCache:
    """By signature; the one in force was used last."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[Signature, CachedPlan] = collections.OrderedDict()
        self.signature: Signature | None = None
        """That the regime in force is for; the step's own, or a larger one."""

    @property
    def current(self) -> CachedPlan | None:
        return None if self.signature is None else self._known[self.signature]

    @property
    def plans(self) -> int:
        """How many there are."""
        return sum(regime.plan is not None for regime in self._known.values())

    def find(self, shape: Signature) -> CachedPlan | None:
        """Brings the regime for a step's shape into force; None where there is none."""
        found = shape if shape in self._known else self._covering(shape)
        if found is None:
            found = self._moved(shape)
        if found is None:
            return None
        self.signature = found
        self._known.move_to_end(found)
        return self._known[found]

    def add(self, signature: Signature, regime: CachedPlan) -> None:
        """Brings a new one into force."""
        self._known[signature] = regime
        self.signature = signature
        if len(self._known) > MAX_PLANS:
            self._known.popitem(last=False)

    def nearest(self, shape: Signature) -> CachedPlan | None:
        """The profiled one to foretell a shape from: measured if there is any, and the nearest in size."""
        profiled = [(known, regime) for known, regime in self._known.items() if regime.profile is not None]

        def distance(known: Signature, regime: CachedPlan) -> tuple[bool, float]:
            assert regime.profile is not None
            return regime.profile.role is not Role.MEASURED, abs(math.log(growth(known, shape)))

        return min(profiled, key=lambda pair: distance(*pair), default=(shape, None))[1]

    def new_signature(self, shape: Signature) -> Signature:
        """What to plan for where this shape comes up after others."""
        return dataclasses.replace(shape, tokens=_rounded_up(shape.tokens)) if self._known else shape

    def _covering(self, shape: Signature) -> Signature | None:
        """The smallest that was planned for a little more than this shape."""
        fits = [
            known
            for known, regime in self._known.items()
            if regime.plan is not None
            and dataclasses.replace(known, batch=shape.batch, tokens=shape.tokens) == shape
            and known.batch >= shape.batch
            and known.tokens >= shape.tokens
            and growth(shape, known) <= 1 + 1 / LENGTHS_PER_OCTAVE
        ]
        return min(fits, key=_tokens, default=None)

    def _moved(self, shape: Signature) -> Signature | None:
        """What is being measured goes on at the next shape: one that never comes again would be measured for ever."""
        regime = self.current
        profiled = any(known.profile is not None for known in self._known.values())  # then others are planned at once
        if regime is None or profiled or not regime.phase.precedes_plan:
            return None
        assert self.signature is not None
        del self._known[self.signature]
        self._known[shape] = regime
        return shape


def joint(shapes: Sequence[Signature]) -> Signature:
    """What covers all of several ranks' batches."""
    return dataclasses.replace(
        shapes[0], batch=max(shape.batch for shape in shapes), tokens=max(shape.tokens for shape in shapes)
    )


def growth(before: Signature, after: Signature) -> float:
    """How many times as many tokens."""
    return _tokens(after) / _tokens(before)


def _tokens(shape: Signature) -> int:
    return shape.batch * shape.tokens


def _rounded_up(tokens: int) -> int:
    step = max(1, (1 << (tokens.bit_length() - 1)) // LENGTHS_PER_OCTAVE)
    return -(-tokens // step) * step
