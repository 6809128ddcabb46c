"""Recompute settings: what of a layer's activations is saved, and what each choice costs.

Pure data: a planner chooses a setting, RecomputePolicy (memo.swap.recompute.policy) applies it. A layer's curve goes from
everything saved to its input alone; a setting is one of its points, or the cheapest cut that saves at most the bytes of a
mix of them.

    point     all           matmuls             attention            input
    saved     everything    matrix products     attention's results  the layer's input (at every point)
    repeated  nothing       element-wise work   all but attention    everything
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping, Sequence

from memo.errors import UsageError

COMPARED = 1 << 22
"""Words, or bytes, that a trial compares at once; bounds `comparing_nbytes`."""

PART_BYTES = 64 << 20
"""Least bytes that a part of a recompute gives: one more of them takes the host some 50 us."""
MOST_PARTS = 8

# tolerance for fractions that come out of floating-point arithmetic
_SLACK = 1e-6
_POINT = re.compile("all|matmuls|attention|input|p[1-9][0-9]*")


class Level(enum.Enum):
    """Part of a layer's activations that is saved; the rest is recomputed in backward."""

    SAVE_ALL = "everything is saved, nothing is recomputed"
    SAVE_MATMULS = (
        "outputs of attention and matmuls (summed over ranks) are saved, element-wise operations are recomputed"
    )
    SAVE_ATTENTION = "outputs of attention are saved, everything else is recomputed"
    SAVE_INPUT = "the layer's input is saved, everything else is recomputed, attention too"

    @property
    def point(self) -> str:
        """Name of the level among the points of a layer's curve."""
        return self.name.removeprefix("SAVE_").lower()

    def __str__(self) -> str:
        return {"all": "alpha 1", "attention": "alpha 0"}.get(self.point, self.point)


_LEVELS = {level.point: level for level in Level}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Point of a layer's curve that is no level, or several: the cheapest cut that saves at most the bytes of their mix.

    Raises:
        UsageError: a fraction is not from 0 to 1, they do not sum to 1, or no point has such a name.
    """

    points: Mapping[str, float]
    """Fraction at each point, by name: `all`, `matmuls`, `attention`, `input`, `p1`, `p2`, ... Not to be changed."""

    def __post_init__(self) -> None:
        shares = tuple(self.points.values())
        if not all(-_SLACK <= share <= 1 + _SLACK for share in shares) or abs(sum(shares) - 1) > _SLACK:
            raise UsageError(f"{', '.join(f'{share:g}' for share in shares)} are not fractions that sum to 1")
        for name in self.points:
            if not _POINT.fullmatch(name):
                raise UsageError(f"no point is called {name!r}; there are all, matmuls, attention, input, p1, p2, ...")

    @property
    def point(self) -> str | None:
        """The one point that the whole layer is at; None for several."""
        return next((name for name, share in self.points.items() if share >= 1 - _SLACK), None)

    def __hash__(self) -> int:
        return hash(frozenset(self.points.items()))

    def __str__(self) -> str:
        if self.points.keys() <= {"all", "attention"}:
            return f"alpha {self.points.get('all', 0.0):g}"
        return " + ".join(f"{share:g} {name}" for name, share in self.points.items())


Setting = Level | Mix
"""Recompute setting of a layer."""


def setting_of(value: object, *, argument: str = "alpha") -> Setting:
    """Converts a caller's value to a setting.

    Args:
        value: a Level; a number alpha from 0 (SAVE_ATTENTION) to 1 (SAVE_ALL); three fractions, of SAVE_ALL, SAVE_MATMULS
            and SAVE_ATTENTION; or a Mix, or fractions by the names of points.
        argument: name of the caller's argument, for the error message.

    Raises:
        UsageError: it is none of these, or its fractions do not sum to 1.
    """
    if isinstance(value, Level):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0.0 <= value <= 1.0:
            raise UsageError(
                f"{argument}: {value} is no fraction; give a number from 0 (recompute all) to 1 (move all)"
            )
        value = {"all": value, "attention": 1 - value}
    elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        value = dict(zip(("all", "matmuls", "attention"), value, strict=True))
    if isinstance(value, Mapping):
        try:
            value = Mix(points=value)
        except (UsageError, TypeError) as error:
            raise UsageError(f"{argument}: {error}") from None
    if not isinstance(value, Mix):
        raise UsageError(
            f"{argument}: {value!r} is neither a fraction, nor three of them, nor a Level; leave it out to have it planned"
        )
    return _LEVELS.get(value.point or "", value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PointCost:
    """One point of a layer's curve."""

    name: str
    """`all`, `matmuls`, `attention` and `input` for the levels, `p1`, `p2`, ... for others."""
    saved_bytes: int
    """All bytes that are saved, the layer's input included."""
    held_bytes: int = 0
    """Most bytes of the recompute beside the layer's saved tensors."""
    recompute_s: float = 0.0
    beside_bytes: int = 0
    """Part of `saved_bytes` that autograd does not save; it stands beside the whole layer."""
    recompute_flops: float = 0.0
    absent_bytes: int = 0
    """Least bytes that are not there at the peak of backward, of all that autograd saved, if its recompute runs in parts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Curve of one layer, measured in its last forward: a planner's input."""

    layer: str
    tokens: int
    """Tokens of one sequence."""
    points: tuple[PointCost, ...]
    """Point `all` first, then ever fewer saved bytes."""
    sizes: tuple[int, ...] = ()
    """Bytes of each storage that autograd saves."""


def least_part_nbytes(given: float) -> float:
    """Least bytes that a part of a recompute gives that gives so many in all."""
    return max(PART_BYTES, given / MOST_PARTS)


def comparing_nbytes(nbytes: int) -> int:
    """Returns the most bytes that a trial allocates to compare the bits of two tensors of `nbytes`: a flag for each word."""
    return min(nbytes, COMPARED)
