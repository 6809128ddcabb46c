"""Coding of a layer's saved bytes: the bytes that a codec spares, and the seconds of compute that it takes.

A profile of training with a codec (memo.kernels.codec) has it: floats are coded on their way to host memory and disk. The
engine's rules say which bytes are coded: docs/codec.md. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import math

from memo.errors import PlanError

CODECS = ("int8", "fp8")
"""Codecs that a profile may have; both take `CODE_BYTES` a value."""

CODE_BYTES = 1 + 4 / 128
"""Bytes of a coded value: its one-byte code, and its part of the float32 scale of 128 values."""

ENCODE_TRAFFIC, DECODE_TRAFFIC = 45.0, 6.0
"""Bytes of device memory read and written for each value, in coding and in decoding. Those of coding include finding the
error, which operators of torch compute in float32 (memo.kernels.codec.coded_error). Counted from the code; equal for
bfloat16 and float32 within a tenth."""
CHECKED_VALUES, CHECKED_BYTES = 1 << 24, 14
"""Values of one pass of the error computation (memo.kernels.codec.CHECKED), and the most bytes that it takes for each."""


def checking_nbytes(values: float) -> int:
    """Bytes on the device while the error of a storage with this number of values is computed."""
    return math.ceil(CHECKED_BYTES * min(values, CHECKED_VALUES))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """Coding of one class of layers."""

    spared_bytes: int = 0
    """Bytes by which a layer at point `all` is fewer as codes. At any other point what is saved moves whole, as the
    recompute reads it."""
    encode_s: float = 0.0
    """Seconds of coding all values that can be coded, in a forward; of a part of them, in proportion. 0 where a measured
    forward contains them."""
    decode_s: float = 0.0
    """Seconds of a backward, likewise."""

    @classmethod
    def at_rate(cls, bytes_per_s: float, *, values: float, spared_bytes: int) -> Coding:
        """Coding of a layer with this number of values that can be coded, on a device with this memory bandwidth."""
        return cls(
            spared_bytes=spared_bytes,
            encode_s=ENCODE_TRAFFIC * values / bytes_per_s,
            decode_s=DECODE_TRAFFIC * values / bytes_per_s,
        )

    def __post_init__(self) -> None:
        if self.spared_bytes < 0 or not all(0 <= s < math.inf for s in (self.encode_s, self.decode_s)):
            raise PlanError(f"coding: {self.spared_bytes} bytes, {self.encode_s} and {self.decode_s} s are no amounts")
