"""0/1 masks packed to bits: element i, counted row-major, is bit i % 8 of byte i // 8.

A dropout's mask decides a recompute and must be saved; torch keeps it as bytes or, on a CPU, as numbers of the
activations' type. The unused bits of the last byte are zero.
"""

from __future__ import annotations

import torch

from memo.errors import UsageError
from memo.kernels.dispatch import current, on_triton

__all__ = ["mask_nbytes", "pack_mask", "pack_mask_reference", "unpack_mask", "unpack_mask_reference"]


def mask_nbytes(count: int) -> int:
    """Bytes of `count` packed elements."""
    return -(-count // 8)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """The bits of `mask != 0`, as uint8. `mask` is of any type and rows of contiguous runs, or is copied to be."""
    if on_triton(mask):
        from memo.kernels import masks_triton

        with current(mask.device):
            return masks_triton.pack(mask)
    return pack_mask_reference(mask)


def unpack_mask(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes 0 and 1 of `out`'s type over all of `out`, which is rows of contiguous runs; returns it.

    Raises:
        UsageError: `bits` are not those of as many elements.
    """
    if bits.dtype is not torch.uint8 or bits.ndim != 1 or bits.numel() != mask_nbytes(out.numel()):
        raise UsageError(
            f"{out.numel()} elements are {mask_nbytes(out.numel())} uint8, not {bits.numel()} {bits.dtype}"
        )
    if on_triton(out):
        from memo.kernels import masks_triton

        with current(out.device):
            return masks_triton.unpack(bits, out)
    return unpack_mask_reference(bits, out)


def pack_mask_reference(mask: torch.Tensor) -> torch.Tensor:
    """`pack_mask` in torch."""
    flat = (mask != 0).flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    packed = torch.zeros(padded.size(0), dtype=torch.uint8, device=mask.device)
    for bit in range(8):
        packed |= padded[:, bit].to(torch.uint8) << bit
    return packed


def unpack_mask_reference(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`unpack_mask` in torch."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    elements = ((bits.unsqueeze(1) >> shifts) & 1).flatten()[: out.numel()]
    return out.copy_(elements.view(out.shape))
