"""Token ranges of several tensors into one contiguous block, and back.

A copy engine moves one contiguous block at the link's full rate; the tokens that leave are runs spread over the rows of
several storages. One launch brings them together. Where a tensor lies in the block is a function of the views' shapes
alone, so that the way back needs no record of the way there.

    views     |head|tail|head|tail|    |head|tail|
    staging   |head|head|..|head|                      each tensor's values in row-major order, begun at ALIGNMENT

Does not own the block, nor when the copies run: everything here is work of the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memo.errors import UsageError
from memo.kernels.codec import ALIGNMENT, Codec, decode, encode
from memo.kernels.dispatch import current, on_triton

__all__ = ["pack_reference", "pack_views", "places", "staging_nbytes", "unpack_reference", "unpack_views"]


def places(views: Sequence[torch.Tensor], codec: Codec = Codec.EXACT) -> list[tuple[int, int]]:
    """(offset, bytes) of each view in the staging block."""
    found, offset = [], 0
    for view in views:
        codec.require(view.dtype)
        nbytes = codec.nbytes(view.numel(), view.itemsize)
        found.append((offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return found


def staging_nbytes(views: Sequence[torch.Tensor], codec: Codec = Codec.EXACT) -> int:
    """Bytes that the views take in a staging block; one view alone takes its own bytes and no more."""
    offset, nbytes = places(views, codec)[-1] if views else (0, 0)
    return offset + nbytes


def pack_views(views: Sequence[torch.Tensor], staging: torch.Tensor, *, codec: Codec = Codec.EXACT) -> None:
    """Writes the views' values into `staging`, a contiguous block of bytes.

    Raises:
        UsageError: `staging` is no block of enough bytes, a view is not rows of contiguous runs, or its type has no code.
    """
    _require_block(views, staging, codec)
    if on_triton(staging):
        from memo.kernels import staging_triton

        with current(staging.device):
            staging_triton.pack(views, staging, codec)
    else:
        pack_reference(views, staging, codec)


def unpack_views(staging: torch.Tensor, views: Sequence[torch.Tensor], *, codec: Codec = Codec.EXACT) -> None:
    """Writes the values in `staging` into the views; no other byte of their storages is touched. Raises as pack_views."""
    _require_block(views, staging, codec)
    if on_triton(staging):
        from memo.kernels import staging_triton

        with current(staging.device):
            staging_triton.unpack(staging, views, codec)
    else:
        unpack_reference(staging, views, codec)


def pack_reference(views: Sequence[torch.Tensor], staging: torch.Tensor, codec: Codec) -> None:
    """`pack_views` in torch."""
    for view, (offset, nbytes) in zip(views, places(views, codec), strict=True):
        block = staging[offset : offset + nbytes]
        if codec is Codec.EXACT:
            values = _as_bytes(view)
            block.view(values.shape).copy_(values)
            continue
        payload, scales = encode(view.flatten(), codec)
        block[: view.numel()] = payload
        block[codec.scales_offset(view.numel()) :] = scales.view(torch.uint8)


def unpack_reference(staging: torch.Tensor, views: Sequence[torch.Tensor], codec: Codec) -> None:
    """`unpack_views` in torch."""
    for view, (offset, nbytes) in zip(views, places(views, codec), strict=True):
        block = staging[offset : offset + nbytes]
        if codec is Codec.EXACT:
            values = _as_bytes(view)
            values.copy_(block.view(values.shape))
            continue
        # A copy of its own, since a part of the block need not lie at a multiple of the scales' size.
        scales = block[codec.scales_offset(view.numel()) :].clone().view(torch.float32)
        view.copy_(decode(block[: view.numel()], scales, codec).view(view.shape))


def _as_bytes(view: torch.Tensor) -> torch.Tensor:
    """The same memory, whatever its strides, with the bytes of a value as a last dimension."""
    return view.detach().unsqueeze(-1).view(torch.uint8)


def _require_block(views: Sequence[torch.Tensor], staging: torch.Tensor, codec: Codec) -> None:
    needed = staging_nbytes(views, codec)
    if staging.dtype is not torch.uint8 or staging.ndim != 1 or staging.stride(0) != 1 or staging.numel() < needed:
        raise UsageError(
            f"a staging block is a contiguous row of at least {needed} uint8 here, "
            f"not {tuple(staging.shape)} of {staging.dtype} with strides {staging.stride()}"
        )
    for view in views:
        if view.device != staging.device:
            raise UsageError(f"a view on {view.device} cannot be packed into a block on {staging.device}")
