"""Limit on the elements that torch's own norms on CUDA are given: beyond it they would leave rows wrong, silently.

`torch.nn.LayerNorm` and `torch.nn.RMSNorm` find a row at `blockIdx.x * width`, computed in 32 bits without a sign, in
forward and in backward (aten/src/ATen/native/cuda/layer_norm_kernel.cu). A row that begins at element 2^32 or later is read
and written where another one lies. Norms written in plain operators, as Hugging Face's RMSNorms are, count in 64 bits.

That was read in torch's source and in its issue 181555 of April 2026, and not seen on a GPU here. Pull request 181600 mends
it, in a release that is not known here; 2.11 is older. So every torch is held to the limit, until
`tests/gpu/test_norms_cuda.py` fails on one that no longer needs it. Not known: whether the sums over rows that make the
gradients of a norm's weights count right at all such lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from memo.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["NORM_ELEMENTS", "require_layer_within_norm_limit", "require_within_norm_limit"]

NORM_ELEMENTS = 1 << 32
"""The last row of so many elements begins below 2^32: a million tokens of width 4096 are right."""
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def require_within_norm_limit(hidden: torch.Tensor, what: str) -> None:
    """Raises UsageError where a norm of `hidden`, a rank's own part, would be wrong. `what` names who would compute it."""
    if hidden.numel() > NORM_ELEMENTS and hidden.is_cuda:
        raise UsageError(
            f"{what} would normalise {' x '.join(map(str, hidden.shape))} = {hidden.numel()} elements, and torch's norms "
            f"on CUDA leave rows from element {NORM_ELEMENTS} on wrong; give each rank fewer tokens: a smaller batch, "
            f"shorter sequences, or context or sequence parallelism"
        )


def require_layer_within_norm_limit(name: str, layer: nn.Module, hidden: torch.Tensor) -> None:
    """Raises UsageError where `layer` has one of torch's norms, which would be wrong of its input `hidden`."""
    if hidden.numel() > NORM_ELEMENTS and any(isinstance(module, _NORMS) for module in layer.modules()):
        require_within_norm_limit(getattr(hidden, "_local_tensor", hidden), name)  # of a DTensor this rank's part
