"""Gradient norm of a model that is divided over ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


def gradient_norm(parameters: Iterable[nn.Parameter], *, copies: int) -> float:
    """2-norm of all gradients over all ranks, each counted once, computed in float64. A collective call.

    Args:
        parameters: of this rank; those without gradient are skipped.
        copies: ranks that hold the same pipeline stage. An ordinary parameter exists on all of them, a DTensor's shards
            on `copies` divided by their number.
    """
    square = 0.0
    device = torch.device("cpu")
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        local, count = grad, copies
        if isinstance(grad, DTensor):
            local, count = grad.to_local(), copies // _shards(grad)
        device = local.device
        square += float(torch.linalg.vector_norm(local, dtype=torch.float64)) ** 2 / count
    total = torch.tensor(square, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return math.sqrt(float(total))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Scales gradients in place by limit / (norm + 1e-6) where that is below one, as torch's clip_grad_norm_ does."""
    factor = limit / (norm + 1e-6)
    if not factor < 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor)


def _shards(grad: DTensor) -> int:
    """Number of distinct shards of a gradient on its mesh."""
    mesh = grad.device_mesh
    return math.prod(mesh.size(dim) for dim, placed in enumerate(grad.placements) if not isinstance(placed, Replicate))
