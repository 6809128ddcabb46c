"""Packing of token ranges of several tensors into one contiguous staging block, and back.

A copy engine moves one contiguous block at the link's full rate; offloaded tokens are runs spread over the rows of
several storages. One launch gathers them. The offset of a tensor in the block depends only on the views' shapes and
dtypes, so unpacking needs no metadata.

    views     |head|tail|head|tail|    |head|tail|
    staging   |head|head|..|head|                      each tensor in row-major order, at a multiple of ALIGNMENT

Does not own the block nor order the copies: all work is issued on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memo.errors import UsageError
from memo.kernels.codec import ALIGNMENT, GROUP, Codec, decode, encode
from memo.kernels.dispatch import current, on_triton

__all__ = [
    "CHECKED",
    "coded_error",
    "pack_reference",
    "pack_views",
    "staging_nbytes",
    "staging_offsets",
    "unpack_reference",
    "unpack_views",
]

CHECKED = 1 << 24
"""Values whose error is found at once: a multiple of GROUP that bounds the memory that it takes."""


def staging_offsets(views: Sequence[torch.Tensor], codec: Codec = Codec.EXACT) -> list[tuple[int, int]]:
    """Returns (offset, bytes) of each view in the staging block.

    Raises:
        UsageError: `codec` cannot represent the dtype of a view.
    """
    found, offset = [], 0
    for view in views:
        codec.require(view.dtype)
        nbytes = codec.nbytes(view.numel(), view.itemsize)
        found.append((offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return found


def staging_nbytes(views: Sequence[torch.Tensor], codec: Codec = Codec.EXACT) -> int:
    """Returns the bytes of a staging block for the views; no padding after the last one."""
    offset, nbytes = staging_offsets(views, codec)[-1] if views else (0, 0)
    return offset + nbytes


def pack_views(views: Sequence[torch.Tensor], staging: torch.Tensor, *, codec: Codec = Codec.EXACT) -> None:
    """Copies the views into `staging`.

    Args:
        views: Tensors of any dtype, rows of contiguous runs (memo.kernels.strided_runs), on the device of `staging`.
        staging: Contiguous uint8 of shape (n,), n at least `staging_nbytes(views, codec)`.
        codec: Format in the block.

    Raises:
        UsageError: An argument is not as described, or `codec` cannot represent a view. `staging` is unchanged.
    """
    _require_block(views, staging, codec)
    if on_triton(staging):
        from memo.kernels import staging_triton

        with current(staging.device):
            staging_triton.pack(views, staging, codec)
    else:
        pack_reference(views, staging, codec)


def unpack_views(staging: torch.Tensor, views: Sequence[torch.Tensor], *, codec: Codec = Codec.EXACT) -> None:
    """Copies `staging` back into the views; other bytes of their storages are unchanged.

    Args:
        staging: Block that `pack_views` wrote from views of equal shapes and dtypes.
        views: As for `pack_views`; overwritten.
        codec: Format of the block.

    Raises:
        UsageError: As for `pack_views`.
    """
    _require_block(views, staging, codec)
    if on_triton(staging):
        from memo.kernels import staging_triton

        with current(staging.device):
            staging_triton.unpack(staging, views, codec)
    else:
        unpack_reference(staging, views, codec)


def coded_error(values: torch.Tensor, block: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns what coding did to a tensor, float32 of shape (2,), without waiting for the device.

    Args:
        values: one-dimensional, as it was packed alone.
        block: begins with the codes and scales of `values`.
        codec: INT8 or FP8.

    Returns:
        Number of groups that are not finite, and largest |x' - x| as a share of the largest magnitude of its group.
    """
    count = values.numel()
    scales = block[codec.scales_offset(count) :][: 4 * -(-count // GROUP)].clone().view(torch.float32)
    largest = torch.zeros((), device=values.device)
    for begin in range(0, count, CHECKED):
        part, of_part = values[begin : begin + CHECKED], scales[begin // GROUP : (begin + CHECKED) // GROUP]
        decoded = decode(block[begin : begin + part.numel()], of_part, codec).to(values.dtype)
        off = (decoded.float() - part.float()).abs_()
        off = torch.nn.functional.pad(off, (0, -off.numel() % GROUP)).view(-1, GROUP).amax(dim=1)
        relative = torch.nan_to_num(off / (of_part * codec.top), nan=0.0, posinf=0.0)
        largest = torch.maximum(largest, relative.amax())
    return torch.stack([torch.isnan(scales).sum().float(), largest])


def pack_reference(views: Sequence[torch.Tensor], staging: torch.Tensor, codec: Codec) -> None:
    """Implements `pack_views` in torch."""
    for view, (offset, nbytes) in zip(views, staging_offsets(views, codec), strict=True):
        block = staging[offset : offset + nbytes]
        if codec is Codec.EXACT:
            values = _as_bytes(view)
            block.view(values.shape).copy_(values)
            continue
        payload, scales = encode(view.flatten(), codec)
        block[: view.numel()] = payload
        block[codec.scales_offset(view.numel()) :] = scales.view(torch.uint8)


def unpack_reference(staging: torch.Tensor, views: Sequence[torch.Tensor], codec: Codec) -> None:
    """Implements `unpack_views` in torch."""
    for view, (offset, nbytes) in zip(views, staging_offsets(views, codec), strict=True):
        block = staging[offset : offset + nbytes]
        if codec is Codec.EXACT:
            values = _as_bytes(view)
            values.copy_(block.view(values.shape))
            continue
        # Cloned: the view as float32 needs an address that is a multiple of 4.
        scales = block[codec.scales_offset(view.numel()) :].clone().view(torch.float32)
        view.copy_(decode(block[: view.numel()], scales, codec).view(view.shape))


def _as_bytes(view: torch.Tensor) -> torch.Tensor:
    """View of the same memory as uint8, with the bytes of a value as the last dimension."""
    return view.detach().unsqueeze(-1).view(torch.uint8)


def _require_block(views: Sequence[torch.Tensor], staging: torch.Tensor, codec: Codec) -> None:
    needed = staging_nbytes(views, codec)
    if staging.dtype is not torch.uint8 or staging.ndim != 1 or staging.stride(0) != 1 or staging.numel() < needed:
        raise UsageError(
            f"staging must be one contiguous dimension of at least {needed} uint8, "
            f"not {tuple(staging.shape)} of {staging.dtype} with strides {staging.stride()}"
        )
    for view in views:
        if view.device != staging.device:
            raise UsageError(f"a view on {view.device} cannot be packed into a block on {staging.device}")
