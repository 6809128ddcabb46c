"""Memory of AdamW on the host: what it takes there, and what its gradients take on the device. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.units import format_bytes

if TYPE_CHECKING:
    import torch

IN_FLIGHT_BYTES = 1 << 30
"""Most bytes of gradients on the device, unless one alone is larger; beyond it backward waits for the oldest copy."""
GROUP_BYTES = 256 << 20
"""Bytes of parameters that are updated together; their copies to the device overlap with the next group's update."""
_ALIGNED = 64
"""Bytes to which host tensors are aligned, as torch aligns them."""


def optimizer_host_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of host memory for a copy, the gradient and AdamW's two moments of each parameter."""
    return sum(4 * aligned(parameter.nbytes) for parameter in parameters)


def require_optimizer_room(nbytes: int, free_bytes: int) -> None:
    """Raises UsageError where the host has less memory free than the optimizer takes."""
    if nbytes > free_bytes:
        raise UsageError(
            f"--optimizer-offload takes {format_bytes(nbytes, up=True)} of host memory for a copy of the parameters, their "
            f"gradients and AdamW's state, and {format_bytes(free_bytes, down=True)} are free; free some, or train a "
            "smaller model"
        )


def aligned(nbytes: int) -> int:
    """Bytes that a tensor of `nbytes` takes."""
    return -(-nbytes // _ALIGNED) * _ALIGNED
