"""Size limit of torch's norm kernels on CUDA: beyond 2^32 elements they silently compute wrong rows.

`torch.nn.LayerNorm` and `torch.nn.RMSNorm` compute the offset of a row as `blockIdx.x * width` in unsigned 32-bit
integers, in forward and backward (aten/src/ATen/native/cuda/layer_norm_kernel.cu). A row that begins at element 2^32 or
later is read and written at another row's place. Norms written in plain operators, such as Hugging Face's RMSNorms, use
64-bit offsets.

Source: torch's code and its issue 181555 of April 2026; not reproduced on a GPU. Pull request 181600 fixes it in an
unknown release after 2.11. The limit applies to every torch version until `tests/gpu/test_norms_cuda.py` fails on one
that does not need it. Unknown: whether the row sums for the gradients of a norm's weights are right at all such
lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from memo.errors import UsageError

if TYPE_CHECKING:
    import torch

NORM_ELEMENTS = 1 << 32
"""The last row of this many elements begins below 2^32: a million tokens of width 4096 are within the limit."""
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def require_within_norm_limit(hidden: torch.Tensor, what: str) -> None:
    """Checks that torch's norms of `hidden` are right.

    Args:
        hidden: This rank's part of the input of a norm.
        what: The module that would compute the norm, for the message.

    Raises:
        UsageError: `hidden` is on CUDA and exceeds the limit.
    """
    if hidden.numel() > NORM_ELEMENTS and hidden.is_cuda:
        raise UsageError(
            f"{what} would normalise {' x '.join(map(str, hidden.shape))} = {hidden.numel()} elements; torch's norms "
            f"on CUDA compute rows from element {NORM_ELEMENTS} on wrong; give each rank fewer tokens: a smaller batch, "
            f"shorter sequences, or context or sequence parallelism"
        )


def require_layer_within_norm_limit(name: str, layer: nn.Module, hidden: torch.Tensor) -> None:
    """Checks a layer's input as `require_within_norm_limit` does, if the layer has a norm of torch's.

    Raises:
        UsageError: It has one, and this rank's part of `hidden` exceeds the limit on CUDA.
    """
    if hidden.numel() > NORM_ELEMENTS and any(isinstance(module, _NORMS) for module in layer.modules()):
        require_within_norm_limit(getattr(hidden, "_local_tensor", hidden), name)  # of a DTensor this rank's part
