"""How a value is written into a staging block: as it is, or in one byte of a group with a common scale.

Groups are 128 consecutive values in staging order; each has a float32 scale, its largest magnitude divided by the largest
value of the code. The payload comes first, then the scales; both parts begin at multiples of ALIGNMENT.

    int8   multiples of scale = amax / 127    |x' - x| <= amax / 254 * (1 + 2^-13)
    e4m3   3 bits of mantissa, amax / 448     |x' - x| <= max(2^-4 |x|, amax * 2^-10 / 448) * (1 + 2^-13)

with amax the largest magnitude in the group, at least SMALLEST; the factor is for float32's own rounding (an int8 code of
127 is off by 127 times 2^-22). On top comes the rounding to the type of x when it is narrower than float32. A group with a
value that is not finite, or beyond LARGEST, comes back as NaN, all of it: the loss of the step says so, where a clipped
infinity would pass. EXACT is the default everywhere: with it gradients stay bit-identical, and with any other code they
do not.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F

from memo.errors import UsageError

__all__ = ["ALIGNMENT", "GROUP", "LARGEST", "SMALLEST", "Codec", "decode", "encode", "error_bound"]

GROUP = 128
ALIGNMENT = 16  # bytes of one vector access of a GPU
SMALLEST = 2.0**-100  # below, a scale would lose bits to float32's subnormal numbers
LARGEST = 2.0**127  # above, the largest code times a scale rounded up would overflow float32
VALUES = (torch.float32, torch.bfloat16, torch.float16)


class Codec(enum.Enum):
    """What one value becomes."""

    EXACT = "the bytes as they are"
    INT8 = "8-bit whole numbers, a scale for 128"
    FP8 = "float8 e4m3, a scale for 128"

    @property
    def top(self) -> float:
        """The largest value of the code."""
        return {Codec.INT8: 127.0, Codec.FP8: 448.0}[self]

    def payload_nbytes(self, count: int, itemsize: int) -> int:
        return count * itemsize if self is Codec.EXACT else count

    def nbytes(self, count: int, itemsize: int) -> int:
        """Bytes that `count` values of one tensor take in a staging block."""
        if self is Codec.EXACT:
            return count * itemsize
        return self.scales_offset(count) + 4 * -(-count // GROUP)

    def scales_offset(self, count: int) -> int:
        """Where the scales begin, behind the payload."""
        return -(-count // ALIGNMENT) * ALIGNMENT

    def require(self, dtype: torch.dtype) -> None:
        """Raises UsageError for a type that this code cannot hold."""
        if self is not Codec.EXACT and dtype not in VALUES:
            raise UsageError(f"{self.name.lower()} holds float32, bfloat16 and float16, not {dtype}; use Codec.EXACT")


def encode(values: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, one byte a value; scales, float32), of values in a row."""
    groups = F.pad(values.float(), (0, -values.numel() % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(dim=1)
    fits = largest <= LARGEST  # false for NaN
    largest = torch.where(fits, largest, 0.0).clamp(min=SMALLEST)
    top = torch.full_like(largest, codec.top)  # with a number in its place torch multiplies by a rounded reciprocal
    scales = torch.where(fits, largest / top, torch.nan)
    scaled = torch.where(fits[:, None], groups, 0.0) * (top / largest)[:, None]
    scaled = scaled.clamp(-codec.top, codec.top)
    codes = scaled.round().to(torch.int8) if codec is Codec.INT8 else scaled.to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).flatten()[: values.numel()], scales


def decode(payload: torch.Tensor, scales: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The values in float32."""
    codes = payload.view(torch.int8 if codec is Codec.INT8 else torch.float8_e4m3fn).float()
    return codes * scales.repeat_interleave(GROUP)[: payload.numel()]


def error_bound(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The largest |x' - x| of each finite value, as the module states it; float64."""
    wide = values.double()
    groups = F.pad(wide.abs(), (0, -wide.numel() % GROUP)).view(-1, GROUP)
    largest = groups.amax(dim=1).clamp(min=SMALLEST).repeat_interleave(GROUP)[: wide.numel()]
    if codec is Codec.EXACT:
        return torch.zeros_like(wide)
    if codec is Codec.INT8:
        coded = largest / 254
    else:
        coded = torch.maximum(wide.abs() / 16, largest / 448 / 1024)
    coded = coded * (1 + 2**-13)
    if values.dtype is torch.float32:
        return coded
    # Rounding x' to x's type: half a unit in its last place, also where it is subnormal.
    last = torch.finfo(values.dtype)
    return coded + torch.clamp((wide.abs() + coded) * last.eps / 2, min=last.smallest_normal * last.eps / 2)
