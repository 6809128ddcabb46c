"""Recompute levels: how much of a layer's activations is saved, and how it is divided among the levels.

Pure data: a planner chooses it, RecomputePolicy (memo.swap.recompute.policy) applies it: the cheapest cut that saves at
most the bytes of the fractions. In pieces, a layer's tokens are divided into consecutive ranges in the order of the levels,
so the saved part of any tensor is one prefix of its tokens.

    tokens      0            k1              k2            s
                |  SAVE_ALL  |  SAVE_MATMULS   |  SAVE_ATTENTION   |
    saved         everything   matrix products   attention          (the layer's input and attention's results always)
    repeated      nothing      element-wise      all but attention
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

from memo.errors import UsageError

__all__ = [
    "AT_ONCE",
    "COMPARED",
    "LEAST_TOKENS",
    "LayerCosts",
    "Level",
    "Mix",
    "PointCost",
    "Setting",
    "TokenLevels",
    "comparing_nbytes",
    "setting_of",
    "tile_of",
]

# A matrix product over the last rows has the bits of the product over all rows if each row has the same position in its
# kernel's tile in both, and the kernel is the same. So sequences are divided at multiples of a tile: long ones of one that
# fits every kernel, short ones of a CPU's. A recomputed range has at least LEAST_TOKENS tokens, since libraries have other
# kernels for fewer rows.
_LONG_TILE, _SHORT_TILE = 256, 8
_LONG = 8 * _LONG_TILE
LEAST_TOKENS = 16

COMPARED = 1 << 19
"""Elements that a trial compares at once; bounds `comparing_nbytes`."""

AT_ONCE = 1 - 1e-7
"""Piece of all tokens: they are divided among the levels, and each level's are computed at once."""

# tolerance for fractions that come out of floating-point arithmetic
_SLACK = 1e-6


class Level(enum.Enum):
    """Part of a token's activations that is saved; the rest is recomputed in backward."""

    SAVE_ALL = "everything is saved, nothing is repeated"
    SAVE_MATMULS = (
        "results of attention and of matrix products (ranks' sums of them) are saved, element-wise work is repeated"
    )
    SAVE_ATTENTION = "results of attention are saved, everything else is repeated"
    SAVE_INPUT = "the layer's input is saved, everything that can be repeated is, attention too; for whole layers only"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLevels:
    """Fractions of a layer at each level; in pieces, of its tokens, in their order.

    Raises:
        UsageError: a fraction is not from 0 to 1, they do not sum to 1, or the piece is 0.
    """

    all: float = 0.0
    matmuls: float = 0.0
    attention: float = 0.0
    piece: float = 1.0
    """Largest fraction of the tokens that a replay computes at once, where a token axis is proven: it bounds what the replay
    holds. AT_ONCE: tokens are divided, and each level's computed at once. 1: they are not divided."""

    def __post_init__(self) -> None:
        _require_fractions((self.all, self.matmuls, self.attention), argument="TokenLevels")
        if not 0 < self.piece <= 1:
            raise UsageError(
                f"TokenLevels: a piece of {self.piece:g} is no fraction of the tokens; give one from 0 to 1"
            )

    @classmethod
    def of_alpha(cls, alpha: float, *, argument: str = "alpha") -> TokenLevels:
        """Returns MEMO's two levels: SAVE_ALL for the fraction `alpha`, SAVE_ATTENTION for the rest.

        Raises:
            UsageError: `alpha` is not from 0 to 1.
        """
        if not 0.0 <= alpha <= 1.0:
            raise UsageError(
                f"{argument}: {alpha} is no fraction; give a number from 0 (recompute all) to 1 (move all)"
            )
        return cls(all=alpha, attention=1.0 - alpha)

    def ends(self, tokens: int) -> tuple[int, int]:
        """Returns the ends of the first two ranges, of `tokens` tokens."""
        first, second = _kept(self.all, tokens), _kept(self.all + self.matmuls, tokens)
        if tokens - LEAST_TOKENS < second < tokens:
            second = max(0, tokens - LEAST_TOKENS) // tile_of(tokens) * tile_of(tokens)
        return min(first, second), second

    def piece_tokens(self, tokens: int) -> int | None:
        """Returns the most tokens that a replay computes at once, of `tokens`; None where pieces are not asked for."""
        if self.piece >= 1:
            return None
        return min(tokens, max(_kept(self.piece, tokens), -(-2 * LEAST_TOKENS // tile_of(tokens)) * tile_of(tokens)))

    @property
    def repeats_nothing(self) -> bool:
        """True if every token is saved whole."""
        return self.all >= 1 - _SLACK

    def __str__(self) -> str:
        pieces = (
            f", in pieces of {self.piece:g}" if self.piece < AT_ONCE else ", of the tokens" if self.piece < 1 else ""
        )
        if self.matmuls < _SLACK:
            return f"alpha {self.all:g}{pieces}"
        return f"levels {self.all:g} all, {self.matmuls:g} matmuls, {self.attention:g} attention{pieces}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Fractions of a layer at named points of its curve: a setting beyond the three levels.

    Raises:
        UsageError: a fraction is not from 0 to 1, or they do not sum to 1.
    """

    points: Mapping[str, float]
    """Fraction at each point, by name. A layer that cannot be divided is at one point. Not to be changed."""

    def __post_init__(self) -> None:
        shares = tuple(self.points.values())
        if not all(-_SLACK <= share <= 1 + _SLACK for share in shares) or abs(sum(shares) - 1) > _SLACK:
            raise UsageError(f"Mix: {dict(self.points)} are not fractions that sum to 1")

    def __hash__(self) -> int:
        return hash(frozenset(self.points.items()))

    def __str__(self) -> str:
        return "points " + ", ".join(f"{share:g} {name}" for name, share in self.points.items())


Setting = TokenLevels | Level | Mix
"""Recompute setting of a layer: fractions of its tokens, one level for all of them, or a mix of points."""


def setting_of(value: object, *, argument: str = "alpha") -> TokenLevels | Level:
    """Converts a caller's value to a setting.

    Args:
        value: TokenLevels, a Level, a number alpha from 0 to 1, or three fractions.
        argument: name of the caller's argument, for the error message.

    Raises:
        UsageError: it is none of these, or its fractions do not sum to 1.
    """
    if isinstance(value, TokenLevels) or value is Level.SAVE_INPUT:
        return value
    if isinstance(value, Level):
        return TokenLevels(**{value.name.removeprefix("SAVE_").lower(): 1.0})
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return TokenLevels.of_alpha(value, argument=argument)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        _require_fractions(value, argument=argument)
        return TokenLevels(all=value[0], matmuls=value[1], attention=value[2])
    raise UsageError(f"{argument}: {value!r} is neither a fraction, nor three of them, nor TokenLevels, nor a Level")


def _require_fractions(shares: Sequence[float], *, argument: str) -> None:
    if not all(-_SLACK <= share <= 1 + _SLACK for share in shares) or abs(sum(shares) - 1) > _SLACK:
        shown = "{:g}, {:g} and {:g}".format(*shares)
        raise UsageError(f"{argument}: {shown} are not fractions that sum to 1")


def tile_of(tokens: int) -> int:
    """Returns the granularity of ranges, in tokens, for a sequence of `tokens` tokens."""
    return _LONG_TILE if tokens >= _LONG else _SHORT_TILE


def _kept(fraction: float, tokens: int) -> int:
    if fraction >= 1 - _SLACK:
        return tokens
    return max(0, math.floor(fraction * tokens + _SLACK)) // tile_of(tokens) * tile_of(tokens)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PointCost:
    """One point of a layer's curve, with the whole layer at it."""

    name: str
    """`all`, `matmuls`, `attention` and `input` for the named points, `p1`, `p2`, ... for others."""
    saved_bytes: int
    """All bytes that are saved, of all sequences and tokens, the layer's input included."""
    held_bytes: int = 0
    """Most bytes of the recompute beside the layer's saved tensors."""
    recompute_s: float = 0.0
    beside_bytes: int = 0
    """Part of `saved_bytes` that autograd does not save; it stands beside the whole layer."""
    recompute_flops: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Cost of each level or point for one layer, measured in its last forward: a planner's input."""

    layer: str
    tokens: int
    """Tokens of one sequence; bytes per token are those of all sequences of the batch."""
    input_bytes: int
    """Bytes moved at level SAVE_INPUT."""
    always_bytes: int
    """Bytes moved at every other level: the layer's input, attention's results, and tensors without a token axis."""
    bytes_per_token: dict[Level, float]
    """Further bytes moved for each token at that level; a dropout mask takes one bit an element. A layer without a proven
    token axis has level SAVE_ALL only."""
    beside_per_token: dict[Level, float] = dataclasses.field(default_factory=dict)
    """Part of `bytes_per_token` that autograd does not save and a recompute at that level reuses."""
    held_per_token: dict[Level, float] = dataclasses.field(default_factory=dict)
    """Most bytes that a recompute at that level holds for each token that it computes at once, beside the layer's saved
    tensors."""
    piece_s: float = 0.0
    """Seconds that a recompute takes for each further piece of tokens."""
    recompute_s_per_token: dict[Level, float]
    """Seconds by the fastest trial of the layer and the operators that each level repeats; SAVE_ALL with 0."""
    points: tuple[PointCost, ...] = ()
    """The layer's curve by whole storages, point `all` first: the layer is at one of them."""
    divisible: bool = True
    """Whether its tokens can be divided among the levels."""
    sizes: tuple[int, ...] = ()
    """Bytes of each storage that autograd saves."""

    def nbytes(self, levels: TokenLevels) -> int:
        """Bytes that the layer moves with its tokens divided by `levels`."""
        first, second = levels.ends(self.tokens)
        counts = {Level.SAVE_ALL: first, Level.SAVE_MATMULS: second - first, Level.SAVE_ATTENTION: self.tokens - second}
        return self.always_bytes + round(sum(count * self.bytes_per_token[level] for level, count in counts.items()))


def comparing_nbytes(nbytes: int) -> int:
    """Returns the most bytes that a trial allocates to compare two tensors of `nbytes`, of 16-bit or wider elements.

    Comparing bits takes one byte for each byte; comparing numbers takes two doubles and a flag for each element
    (memo.swap.recompute.comparison).
    """
    return max(min(nbytes, 8 * COMPARED), 17 * min(nbytes // 2, COMPARED))
