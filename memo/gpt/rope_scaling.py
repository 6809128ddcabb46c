"""Scaling of rotary positions for sequences longer than those a model was first trained on. Needs no torch."""

from __future__ import annotations

import dataclasses
import enum
import math

from memo.errors import UsageError
from memo.units import format_tokens


class RopeScalingKind(enum.StrEnum):
    """Changes of rotary frequencies for sequences longer than those a model was first trained on."""

    LINEAR = "linear"
    """All positions divided by the factor (Chen et al. 2023, "Positional Interpolation")."""
    NTK = "ntk"
    """The base raised so that the lowest frequency is divided by the factor and the highest kept: theta s^(d/(d-2))
    ("NTK-aware scaled RoPE", bloc97 2023; Peng et al. 2023, section 3.1)."""
    YARN = "yarn"
    """Frequencies of many turns within the original length kept, those of few divided, a ramp between, and queries and
    keys scaled by 0.1 ln s + 1 (Peng et al. 2023, "YaRN", sections 3.2 to 3.4)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary positions of a model that was first trained on shorter sequences.

    Raises:
        UsageError: the factor is below 1, or the original length is not positive.
    """

    kind: RopeScalingKind
    factor: float
    """Longest sequence now over the original one."""
    original_seq: int
    """Tokens of the sequences that the model was first trained on."""

    def __post_init__(self) -> None:
        if not (1.0 <= self.factor < math.inf):
            raise UsageError(f"rope scaling: the factor is {self.factor:g}; it must be a number of at least 1")
        if self.original_seq < 1:
            raise UsageError(f"rope scaling: an original length of {self.original_seq} tokens; give at least 1")

    @classmethod
    def parse(cls, text: str, *, seq: int) -> RopeScaling | None:
        """Reads `linear:8`, `ntk:8` or `yarn:8`, where `seq` is 8 times the original length; None for `none`.

        Raises:
            UsageError: another text, or a factor that leaves no original length.
        """
        if text == "none":
            return None
        kind, _, factor = text.partition(":")
        try:
            found, number = RopeScalingKind(kind), float(factor)
        except ValueError:
            raise UsageError(
                f"rope scaling {text!r}: give one of {', '.join(RopeScalingKind)} with a factor, such as yarn:8, or none"
            ) from None
        if not 1.0 <= number <= seq:
            raise UsageError(f"rope scaling {text!r}: the factor must be from 1 to the length of a sequence")
        return cls(kind=found, factor=number, original_seq=round(seq / number))

    def __str__(self) -> str:
        return f"{self.kind}:{self.factor:g} of {format_tokens(self.original_seq)} tokens"
