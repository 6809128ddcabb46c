"""Codes of float values: one byte each, with a common scale for each group of 128.

A group is 128 consecutive values; its float32 scale is its largest magnitude divided by the largest code. In a block the
payload comes first, then the scales; both begin at multiples of ALIGNMENT.

    int8   multiples of scale = amax / 127    |x' - x| <= amax / 254 * (1 + 2^-13)
    e4m3   3 bits of mantissa, amax / 448     |x' - x| <= max(2^-4 |x|, amax * 2^-10 / 448) * (1 + 2^-13)

with amax the largest magnitude in the group, at least SMALLEST; the factor covers the rounding of float32 (an int8 code
of 127 is off by 127 times 2^-22). Rounding to the type of x is added when that is narrower than float32. A group with a
non-finite value, or one beyond LARGEST, is decoded as NaN throughout: the loss then shows it, where a clipped infinity
would go unnoticed. All work is issued on the current stream.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F

from memo.errors import UsageError
from memo.kernels.dispatch import current, on_triton

GROUP = 128
ALIGNMENT = 16  # bytes; one vector access of a GPU
SMALLEST = 2.0**-100  # below it a scale would be a subnormal float32 and lose bits
LARGEST = 2.0**127  # above it the largest code times a scale rounded up would overflow float32
VALUES = (torch.float32, torch.bfloat16, torch.float16)
CHECKED = 1 << 24
"""Values whose error is found at once: a multiple of GROUP that bounds the memory that it takes."""


class Codec(enum.Enum):
    """Format of codes."""

    INT8 = "8-bit integers, one scale per 128"
    FP8 = "float8 e4m3, one scale per 128"

    @property
    def top(self) -> float:
        """Largest value of the code."""
        return {Codec.INT8: 127.0, Codec.FP8: 448.0}[self]

    def nbytes(self, count: int) -> int:
        """Returns the bytes of the block of `count` values."""
        return self.scales_offset(count) + 4 * -(-count // GROUP)

    def scales_offset(self, count: int) -> int:
        """Returns the offset of the scales, behind the payload of `count` codes."""
        return -(-count // ALIGNMENT) * ALIGNMENT


def encode(values: torch.Tensor, block: torch.Tensor, codec: Codec) -> None:
    """Writes the codes and scales of `values` into `block`.

    Args:
        values: (n,), contiguous; float32, bfloat16 or float16.
        block: uint8 of at least `codec.nbytes(n)`, one dimension, contiguous, that begins at a multiple of ALIGNMENT bytes
            in its storage.
        codec: the format.

    Raises:
        UsageError: An argument is not as described. `block` is unchanged.
    """
    _require(values, block, codec)
    if on_triton(block):
        from memo.kernels import codec_triton

        with current(block.device):
            codec_triton.encode(values, block, codec)
    else:
        encode_reference(values, block, codec)


def decode(block: torch.Tensor, values: torch.Tensor, codec: Codec) -> None:
    """Overwrites `values` with those of the codes in `block`; arguments and errors as for `encode`."""
    _require(values, block, codec)
    if on_triton(block):
        from memo.kernels import codec_triton

        with current(block.device):
            codec_triton.decode(block, values, codec)
    else:
        decode_reference(block, values, codec)


def coded_error(values: torch.Tensor, block: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns what coding did to a tensor, float32 of shape (2,), without waiting for the device.

    Args:
        values: (n,), contiguous.
        block: their codes and scales.
        codec: the format.

    Returns:
        Number of groups that are not finite, and largest |x' - x| as a share of the largest magnitude of its group.
    """
    scales, largest = scales_in(block, values.numel(), codec), torch.zeros((), device=values.device)
    for begin in range(0, values.numel(), CHECKED):
        part, of_part = values[begin : begin + CHECKED], scales[begin // GROUP : (begin + CHECKED) // GROUP]
        decoded = _decoded(block[begin : begin + part.numel()], of_part, codec).to(values.dtype)
        off = (decoded.float() - part.float()).abs_()
        off = F.pad(off, (0, -off.numel() % GROUP)).view(-1, GROUP).amax(dim=1)
        relative = torch.nan_to_num(off / (of_part * codec.top), nan=0.0, posinf=0.0)
        largest = torch.maximum(largest, relative.amax())
    return torch.stack([torch.isnan(scales).sum().float(), largest])


def scales_in(block: torch.Tensor, count: int, codec: Codec) -> torch.Tensor:
    """View of the scales of `count` values in a block."""
    first = codec.scales_offset(count)
    return block[first : codec.nbytes(count)].view(torch.float32)


def encode_reference(values: torch.Tensor, block: torch.Tensor, codec: Codec) -> None:
    """Implements `encode` in torch."""
    count = values.numel()
    groups = F.pad(values.float(), (0, -count % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(dim=1)
    fits = largest <= LARGEST  # false for NaN
    largest = torch.where(fits, largest, 0.0).clamp(min=SMALLEST)
    top = torch.full_like(largest, codec.top)  # a tensor: by a Python number torch multiplies with a rounded reciprocal
    scaled = torch.where(fits[:, None], groups, 0.0) * (top / largest)[:, None]
    scaled = scaled.clamp(-codec.top, codec.top)
    codes = scaled.round().to(torch.int8) if codec is Codec.INT8 else scaled.to(torch.float8_e4m3fn)
    block[:count] = codes.view(torch.uint8).flatten()[:count]
    scales_in(block, count, codec).copy_(torch.where(fits, largest / top, torch.nan))


def decode_reference(block: torch.Tensor, values: torch.Tensor, codec: Codec) -> None:
    """Implements `decode` in torch."""
    count = values.numel()
    values.copy_(_decoded(block[:count], scales_in(block, count, codec), codec))


def _decoded(payload: torch.Tensor, scales: torch.Tensor, codec: Codec) -> torch.Tensor:
    codes = payload.view(torch.int8 if codec is Codec.INT8 else torch.float8_e4m3fn).float()
    return codes * scales.repeat_interleave(GROUP)[: payload.numel()]


def _require(values: torch.Tensor, block: torch.Tensor, codec: Codec) -> None:
    if values.dtype not in VALUES:
        raise UsageError(f"{codec.name.lower()} codes float32, bfloat16 and float16, not {values.dtype}")
    needed = codec.nbytes(values.numel())
    is_flat = values.ndim == block.ndim == 1 and values.is_contiguous() and block.is_contiguous()
    if not is_flat or block.dtype is not torch.uint8 or block.numel() < needed or block.device != values.device:
        raise UsageError(
            f"codes of {values.numel()} values in one dimension need at least {needed} contiguous uint8 on {values.device}, "
            f"not {tuple(block.shape)} of {block.dtype} on {block.device}"
        )
    if int(block.storage_offset()) % ALIGNMENT:
        raise UsageError(f"a block of codes begins at a multiple of {ALIGNMENT} bytes, not at {block.storage_offset()}")
