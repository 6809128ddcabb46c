"""Coding of a layer's saved bytes: what a codec makes fewer of them, and the seconds of compute that it takes.

A profile has it where it is of training with a codec (memo.kernels.codec), which codes floats on their way to host memory
and disk. Which bytes those are is the engine's rule: docs/codec.md. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math

from memo.errors import PlanError

__all__ = ["CHECKED_VALUES", "CODECS", "CODE_BYTES", "Coding", "checking_nbytes"]

CODECS = ("int8", "fp8")
"""Codecs that a profile may be of; both make as many bytes of a value."""

CODE_BYTES = 1 + 4 / 128
"""Bytes of a coded value: its code, and its part of the float32 scale of 128 values."""

ENCODE_TRAFFIC, DECODE_TRAFFIC = 45.0, 6.0
"""Bytes of device memory that are read and written for each value: of coding with those of finding its error, which is
computed in float32 by operators of torch (memo.kernels.staging.coded_error), and of decoding; counted from the code, of
bfloat16 and float32 alike within a tenth."""
CHECKED_VALUES, CHECKED_BYTES = 1 << 24, 14
"""Values whose error is found at once (memo.kernels.staging.CHECKED), and the most bytes that each of them takes."""


def checking_nbytes(values: float) -> int:
    """Bytes on the device while the error of a storage of so many values is found."""
    return math.ceil(CHECKED_BYTES * min(values, CHECKED_VALUES))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """Coding of one class of layers."""

    spared_bytes: int = 0
    """Bytes by which those that are saved at every point are fewer as codes. Where a part of the layer is recomputed they
    move whole, since the recompute reads them."""
    encode_s: float = 0.0
    """Seconds of a forward in which all that can be coded is coded; of less in proportion. 0 where a measured forward has
    them."""
    decode_s: float = 0.0
    """Seconds of a backward, likewise."""

    @classmethod
    def at_rate(cls, bytes_per_s: float, *, values: float, spared_bytes: int) -> Coding:
        """Coding of a layer with so many values that can be coded, on a device of this memory bandwidth."""
        return cls(
            spared_bytes=spared_bytes,
            encode_s=ENCODE_TRAFFIC * values / bytes_per_s,
            decode_s=DECODE_TRAFFIC * values / bytes_per_s,
        )

    def __post_init__(self) -> None:
        if self.spared_bytes < 0 or not all(0 <= s < math.inf for s in (self.encode_s, self.decode_s)):
            raise PlanError(f"coding: {self.spared_bytes} bytes, {self.encode_s} and {self.decode_s} s are no amounts")
