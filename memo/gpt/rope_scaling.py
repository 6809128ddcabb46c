"""Scaling of rotary frequencies, which lets a model attend over more tokens than it was trained with. Needs no torch.

With head size d, base b, frequencies t_i = b^(-2i/d) and factor s (the new context over the original one, L tokens):

    linear   t_i / s                                  Chen et al. 2023, "Extending Context Window of Large Language Models
                                                      via Positional Interpolation", equation 4
    ntk      (b s^(d/(d-2)))^(-2i/d)                  "NTK-aware" interpolation, in Peng et al. 2023, "YaRN: Efficient
                                                      Context Window Extension of Large Language Models", section 3.1
    yarn     (1 - g) t_i / s + g t_i                  "NTK-by-parts", section 3.2 there: g rises linearly from 0 to 1 while
                                                      the rotations L t_i / 2 pi rise from 1 to 32; and queries and keys
                                                      times 0.1 ln s + 1 each (section 3.4)
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from memo.errors import UsageError
from memo.units import format_tokens, parse_tokens

__all__ = ["RopeScaling"]

Kind = Literal["linear", "ntk", "yarn"]

FEWEST_ROTATIONS, MOST_ROTATIONS = 1.0, 32.0
"""Alpha and beta of YaRN's section 3.2, the values for Llama: frequencies with fewer rotations in the original context are
interpolated in full, those with more not at all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """A kind of scaling and its factor.

    Raises:
        UsageError: the kind is not known, or a number is out of range.
    """

    kind: Kind
    factor: float
    """New context over the original one."""
    original: int
    """Tokens of the context that the model was first trained with."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"--rope-scaling {self.kind!r} is none of {', '.join(get_args(Kind))}; choose one of them")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise UsageError(f"--rope-scaling: the factor is {self.factor}; it must be a number of at least 1")
        if self.original < 1:
            raise UsageError(
                f"--rope-scaling: the original context has {self.original} tokens; it must have at least 1"
            )

    def __str__(self) -> str:
        return f"{self.kind}:{self.factor:g}:{format_tokens(self.original)}"

    @classmethod
    def parse(cls, text: str, seq: int) -> RopeScaling:
        """Parses `KIND:FACTOR[:TOKENS]`; without TOKENS, the original context, it is `seq` divided by the factor.

        Raises:
            UsageError: it is written otherwise, or a number is out of range.
        """
        kind, _, rest = text.partition(":")
        factor_text, _, tokens = rest.partition(":")
        try:
            factor = float(factor_text)
        except ValueError:
            raise UsageError(
                f"--rope-scaling {text!r}: write the kind and the factor, such as yarn:8, or none"
            ) from None
        if not tokens and not (math.isfinite(factor) and factor >= 1):
            return cls(kind=kind, factor=factor, original=seq)  # type: ignore[arg-type]  # raises
        original = parse_tokens(tokens, what="--rope-scaling") if tokens else max(1, round(seq / factor))
        return cls(kind=kind, factor=factor, original=original)  # type: ignore[arg-type]  # checked there

    def frequencies(self, head_dim: int, theta: float) -> list[float]:
        """Angle per token of each pair of a head, in radians; the formulas are in the module's docstring."""
        base = theta
        if self.kind == "ntk" and head_dim > 2:
            base = theta * self.factor ** (head_dim / (head_dim - 2))
        plain = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "ntk":
            return plain
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        return [frequency * (self._kept(frequency) + (1 - self._kept(frequency)) / self.factor) for frequency in plain]

    @property
    def magnitude(self) -> float:
        """Factor of queries and keys, whose square is YaRN's 1 / temperature of the attention scores."""
        return 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" else 1.0

    def _kept(self, frequency: float) -> float:
        """YaRN's gamma: 1 leaves the frequency as it is, 0 divides it by the factor."""
        rotations = self.original * frequency / (2 * math.pi)
        return min(1.0, max(0.0, (rotations - FEWEST_ROTATIONS) / (MOST_ROTATIONS - FEWEST_ROTATIONS)))
