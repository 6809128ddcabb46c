"""Cache of plans by batch shape (signature): a shape uses its own plan, or that of a slightly larger shape.

Owns the shapes of a run and the state of planning for each; memo.autoplan.controller makes the plans. Batches padded to
their longest sequence have a new length in each step, and a plan for every length would never be used again. So:

    first shape          is measured and planned exactly: runs of one length have the best plan
    slightly smaller     uses a plan for at most 1/8 more tokens: its fractions hold, and fewer bytes are kept
    other shapes         are planned for the length rounded up, to one of eight lengths per power of two

Invariant: a plan is never used for more tokens than it was made for.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from typing import TYPE_CHECKING

from memo.autoplan.limits import MEASURING
from memo.autoplan.pace import Pace
from memo.mip.inputs import Role, Signature
from memo.swap import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.mip.activation import ActivationPlan
    from memo.mip.inputs import Profile

MAX_PLANS = 32
"""Signatures whose plans are kept; one more evicts the one not used for longest."""
LENGTHS_PER_OCTAVE = 8
"""Planned lengths between two powers of two."""


class Phase(enum.Enum):
    """State of planning for one signature; a phase lasts one step, comparing two if the first one was off, settled any."""

    WARM_UP = enum.auto()
    """First step: kernels are chosen, and each layer's recompute is tried."""
    PROFILING = enum.auto()
    """The step runs once more, measured; the plan is made of it."""
    PLANNED = enum.auto()
    """The plan's first step."""
    COMPARING = enum.auto()
    """The plan's second step, compared with its prediction."""
    SETTLED = enum.auto()
    """The plan holds, or there is none; from now on a step is compared with the budget alone, and its pace is watched."""
    CHECKING = enum.auto()
    """A settled plan's step, measured because the pace has changed: has the machine, or something outside the layers?"""

    @property
    def measures(self) -> bool:
        """True in phases whose step is timed."""
        return self in (Phase.PROFILING, Phase.COMPARING, Phase.CHECKING)

    @property
    def precedes_plan(self) -> bool:
        """True in phases before the first plan."""
        return self in (Phase.WARM_UP, Phase.PROFILING)


@dataclasses.dataclass(slots=True)
class CachedPlan:
    """State of planning for one signature."""

    phase: Phase = Phase.WARM_UP
    setting: ActivationPlan | Level = MEASURING
    level: Level = MEASURING
    """Level of all layers without a plan: MEASURING, or SAVE_INPUT once a step at MEASURING exceeded the device's budget."""
    profile: Profile | None = None
    layers: tuple[str, ...] = ()
    """Names of the layers that ran in the measured step, which the profile and the plan have; empty: none was measured."""
    corrections: int = 0
    calls: int = 1
    """Calls of each layer in a step: its microbatches."""
    margin_bytes: int = 0
    """Bytes by which a measured peak was above its prediction; the next plan leaves them free."""
    host_margin_bytes: int = 0
    """Bytes that the host tier lacked in steps by a plan; the next plan leaves them free."""
    disk_margin_bytes: int = 0
    """Bytes that the disk tier lacked; the next plan leaves them free."""
    short_plans: int = 0
    """Plans made since a lower tier lacked room in a step by the one before."""
    others_bytes: int = 0
    """Most device memory in use for anything but saved tensors, as the plan assumed."""
    unmeasured_bytes: int = 0
    """Device memory that the plan left free for what no step before it had shown."""
    spare_bytes: int = 0
    """Bytes of the device's budget that the profiled step did not use; negative if it went above."""
    repeated: int = 0
    """Measured steps that were measured again, since recomputes were tried in them."""
    overruns: int = 0
    """Plans in a row whose steps went above the device's budget; 0 once one has held."""
    samples: list[Profile] = dataclasses.field(default_factory=list)
    """Profiles of steps in which plain compute took another time than in `profile`; a second one confirms the first."""
    pace: Pace = dataclasses.field(default_factory=Pace)
    late_bytes: int = 0
    """Bytes on their way to the disk that the device may hold besides what the plan counts."""
    predicted_peak_bytes: int = 0
    """Predicted peak of saved tensors on the device, with the late ones."""
    step_off: float | None = None
    """Measured over predicted step time, minus 1."""
    peak_off: float | None = None
    """Measured over predicted peak, minus 1."""
    measured_s: float | None = None
    measured_peak_bytes: int | None = None

    @property
    def plan(self) -> ActivationPlan | None:
        """The plan; None while all layers are at one level."""
        return None if isinstance(self.setting, Level) else self.setting

    def timed(self, measured_s: float, predicted_s: float) -> None:
        """Notes the time of forward and backward by the plan."""
        self.measured_s, self.step_off = measured_s, measured_s / predicted_s - 1

    def planned(self, plan: ActivationPlan) -> None:
        """Takes a new plan, to be tried in the next step; one that moves and recomputes nothing is settled at once."""
        self.setting, self.samples = plan, []
        self.phase = Phase.PLANNED if plan.declined is None else Phase.SETTLED


class PlanCache:
    """Plans by signature, ordered by last use; the current one was used last."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[Signature, CachedPlan] = collections.OrderedDict()
        self.signature: Signature | None = None
        """Signature of the current entry: the step's own, or a slightly larger one."""

    @property
    def current(self) -> CachedPlan | None:
        """Entry of the step under way."""
        return None if self.signature is None else self._known[self.signature]

    @property
    def plans(self) -> int:
        """Number of signatures that have a plan."""
        return sum(cached.plan is not None for cached in self._known.values())

    def find(self, shape: Signature) -> CachedPlan | None:
        """Makes the entry for a step's shape current and returns it; None if there is none."""
        found = shape if shape in self._known else self._covering(shape)
        if found is None:
            found = self._reassigned(shape)
        if found is None:
            return None
        self.signature = found
        self._known.move_to_end(found)
        return self._known[found]

    def add(self, signature: Signature, cached: CachedPlan) -> None:
        """Adds an entry and makes it current."""
        self._known[signature] = cached
        self.signature = signature
        if len(self._known) > MAX_PLANS:
            self._known.popitem(last=False)

    def nearest(self, shape: Signature) -> CachedPlan | None:
        """Returns the entry from whose profile to predict a shape: measured rather than predicted, then nearest."""
        profiled = [(known, cached) for known, cached in self._known.items() if cached.profile is not None]

        def distance(known: Signature, cached: CachedPlan) -> tuple[bool, float]:
            assert cached.profile is not None
            return cached.profile.role is not Role.MEASURED, abs(math.log(growth(known, shape)))

        return min(profiled, key=lambda pair: distance(*pair), default=(shape, None))[1]

    def new_signature(self, shape: Signature) -> Signature:
        """Signature to plan for: the first shape itself, and a later one rounded up in length."""
        return dataclasses.replace(shape, tokens=_rounded_up(shape.tokens)) if self._known else shape

    def _covering(self, shape: Signature) -> Signature | None:
        """Smallest signature whose plan may be used for this shape."""
        fits = [
            known
            for known, cached in self._known.items()
            if cached.plan is not None
            and dataclasses.replace(known, batch=shape.batch, tokens=shape.tokens) == shape
            and known.batch >= shape.batch
            and known.tokens >= shape.tokens
            and growth(shape, known) <= 1 + 1 / LENGTHS_PER_OCTAVE
        ]
        return min(fits, key=_tokens, default=None)

    def _reassigned(self, shape: Signature) -> Signature | None:
        """Continues the first measurement at the next shape: the shape that it began with may never come again."""
        cached = self.current
        profiled = any(
            known.profile is not None for known in self._known.values()
        )  # then a new shape is planned at once
        if cached is None or profiled or not cached.phase.precedes_plan:
            return None
        assert self.signature is not None
        del self._known[self.signature]
        self._known[shape] = cached
        return shape


def joint(shapes: Sequence[Signature]) -> Signature:
    """Smallest signature that covers the batches of several ranks."""
    return dataclasses.replace(
        shapes[0], batch=max(shape.batch for shape in shapes), tokens=max(shape.tokens for shape in shapes)
    )


def growth(before: Signature, after: Signature) -> float:
    """Tokens of `after` as a multiple of those of `before`."""
    return _tokens(after) / _tokens(before)


def _tokens(shape: Signature) -> int:
    return shape.batch * shape.tokens


def _rounded_up(tokens: int) -> int:
    step = max(1, (1 << (tokens.bit_length() - 1)) // LENGTHS_PER_OCTAVE)
    return -(-tokens // step) * step
