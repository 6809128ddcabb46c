"""The norm of all gradients of a model that is divided over ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["clip_gradients", "gradient_norm"]


def gradient_norm(parameters: Iterable[nn.Parameter], *, copies: int) -> float:
    """The 2-norm over all ranks of the run; each gradient counts once. A collective call.

    `copies` is how many ranks hold the same stage: an ordinary parameter is on all of them alike, a DTensor's mesh says
    how often each of its parts exists.
    """
    square = 0.0
    device = torch.device("cpu")
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        local, alike = grad, copies
        if isinstance(grad, DTensor):
            local, alike = grad.to_local(), copies // _shards(grad)
        device = local.device
        square += float(torch.linalg.vector_norm(local, dtype=torch.float64)) ** 2 / alike
    total = torch.tensor(square, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return math.sqrt(float(total))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scales all gradients down to `limit` where `norm` is above it, as torch's clip_grad_norm_ does."""
    factor = limit / (norm + 1e-6)
    if not factor < 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor)


def _shards(grad: DTensor) -> int:
    """Different parts that the ranks of the gradient's mesh hold between them."""
    mesh = grad.device_mesh
    return math.prod(mesh.size(dim) for dim, placed in enumerate(grad.placements) if not isinstance(placed, Replicate))
