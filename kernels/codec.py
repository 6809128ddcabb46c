"""Formats of values in a staging block: exact bytes, or one-byte codes with a common scale for each group.

A group is 128 consecutive values in staging order; its float32 scale is its largest magnitude divided by the largest
code. The payload comes first, then the scales; both begin at multiples of ALIGNMENT.

    int8   multiples of scale = amax / 127    |x' - x| <= amax / 254 * (1 + 2^-13)
    e4m3   3 bits of mantissa, amax / 448     |x' - x| <= max(2^-4 |x|, amax * 2^-10 / 448) * (1 + 2^-13)

with amax the largest magnitude in the group, at least SMALLEST; the factor covers the rounding of float32 (an int8 code
of 127 is off by 127 times 2^-22). Rounding to the type of x is added when that is narrower than float32. A group with a
non-finite value, or one beyond LARGEST, is decoded as NaN throughout: the loss then shows it, where a clipped infinity
would go unnoticed. EXACT is the default everywhere and the only format that keeps gradients bit-identical.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F

from memo.errors import UsageError

__all__ = ["ALIGNMENT", "GROUP", "LARGEST", "SMALLEST", "VALUES", "Codec", "decode", "encode", "error_bound"]

GROUP = 128
ALIGNMENT = 16  # bytes; one vector access of a GPU
SMALLEST = 2.0**-100  # below it a scale would be a subnormal float32 and lose bits
LARGEST = 2.0**127  # above it the largest code times a scale rounded up would overflow float32
VALUES = (torch.float32, torch.bfloat16, torch.float16)


class Codec(enum.Enum):
    """Format of values in a staging block."""

    EXACT = "bytes unchanged"
    INT8 = "8-bit integers, one scale per 128"
    FP8 = "float8 e4m3, one scale per 128"

    @property
    def top(self) -> float:
        """Largest value of the code."""
        return {Codec.INT8: 127.0, Codec.FP8: 448.0}[self]

    def nbytes(self, count: int, itemsize: int) -> int:
        """Returns the bytes of `count` values of one tensor in a staging block."""
        if self is Codec.EXACT:
            return count * itemsize
        return self.scales_offset(count) + 4 * -(-count // GROUP)

    def scales_offset(self, count: int) -> int:
        """Returns the offset of the scales, behind the payload of `count` codes."""
        return -(-count // ALIGNMENT) * ALIGNMENT

    def require(self, dtype: torch.dtype) -> None:
        """Raises UsageError for a dtype that this format cannot represent."""
        if self is not Codec.EXACT and dtype not in VALUES:
            raise UsageError(f"{self.name.lower()} takes float32, bfloat16 and float16, not {dtype}; use Codec.EXACT")


def encode(values: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises a one-dimensional tensor.

    Args:
        values: float32, bfloat16 or float16.
        codec: INT8 or FP8.

    Returns:
        Payload, uint8, one per value; and scales, float32, one per group.
    """
    groups = F.pad(values.float(), (0, -values.numel() % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(dim=1)
    fits = largest <= LARGEST  # false for NaN
    largest = torch.where(fits, largest, 0.0).clamp(min=SMALLEST)
    top = torch.full_like(largest, codec.top)  # a tensor: by a Python number torch multiplies with a rounded reciprocal
    scales = torch.where(fits, largest / top, torch.nan)
    scaled = torch.where(fits[:, None], groups, 0.0) * (top / largest)[:, None]
    scaled = scaled.clamp(-codec.top, codec.top)
    codes = scaled.round().to(torch.int8) if codec is Codec.INT8 else scaled.to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).flatten()[: values.numel()], scales


def decode(payload: torch.Tensor, scales: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns the float32 values of a payload (uint8, one per value) and its scales (float32, one per group)."""
    codes = payload.view(torch.int8 if codec is Codec.INT8 else torch.float8_e4m3fn).float()
    return codes * scales.repeat_interleave(GROUP)[: payload.numel()]


def error_bound(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns the bound of |x' - x| for each finite value, by the formulas of this module; float64."""
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
    # Rounding of x' to the type of x: half a unit in the last place, subnormal values included.
    last = torch.finfo(values.dtype)
    return coded + torch.clamp((wide.abs() + coded) * last.eps / 2, min=last.smallest_normal * last.eps / 2)
