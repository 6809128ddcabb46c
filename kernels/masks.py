"""Bit-packed 0/1 masks: element i in row-major order is bit i % 8 of byte i // 8.

The unused bits of the last byte are zero. Recompute needs the saved mask of a dropout. torch stores it as bytes or, on
a CPU, in the dtype of the activations.
"""

from __future__ import annotations

import torch

from memo.errors import UsageError
from memo.kernels.dispatch import current, on_triton


def mask_nbytes(count: int) -> int:
    """Returns the bytes of `count` packed elements."""
    return -(-count // 8)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """Packs `mask != 0`.

    Args:
        mask: Any shape and dtype; copied unless it is contiguous.

    Returns:
        uint8 of shape (mask_nbytes(mask.numel()),).
    """
    if on_triton(mask):
        from memo.kernels import masks_triton

        with current(mask.device):
            return masks_triton.pack(mask)
    return pack_mask_reference(mask)


def unpack_mask(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Unpacks `bits` into `out`, as 0 and 1 of its dtype.

    Args:
        bits: uint8 of shape (mask_nbytes(out.numel()),).
        out: Any shape and dtype, contiguous; overwritten.

    Returns:
        `out`.

    Raises:
        UsageError: `bits` has another dtype or size, or `out` is not contiguous. `out` is unchanged.
    """
    if bits.dtype is not torch.uint8 or bits.ndim != 1 or bits.numel() != mask_nbytes(out.numel()):
        raise UsageError(
            f"a packed mask of {out.numel()} elements is {mask_nbytes(out.numel())} uint8, not {bits.numel()} of"
            f" {bits.dtype}"
        )
    if not out.is_contiguous():
        raise UsageError(f"a mask is unpacked into contiguous memory, not into strides {out.stride()}")
    if on_triton(out):
        from memo.kernels import masks_triton

        with current(out.device):
            return masks_triton.unpack(bits, out)
    return unpack_mask_reference(bits, out)


def pack_mask_reference(mask: torch.Tensor) -> torch.Tensor:
    """Implements `pack_mask` in torch."""
    flat = (mask != 0).flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    packed = torch.zeros(padded.size(0), dtype=torch.uint8, device=mask.device)
    for bit in range(8):
        packed |= padded[:, bit].to(torch.uint8) << bit
    return packed


def unpack_mask_reference(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Implements `unpack_mask` in torch."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    elements = ((bits.unsqueeze(1) >> shifts) & 1).flatten()[: out.numel()]
    return out.copy_(elements.view(out.shape))
