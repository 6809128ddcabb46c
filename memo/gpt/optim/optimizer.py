"""AdamW with two parameter groups: weight decay for matrices, none for vectors (norms and biases)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from memo.gpt.optim.host_optimizer import HostOptimizer

# Decay of a norm's gain would pull the layer's output towards zero.
_DECAY_FROM_DIM = 2


def adamw(
    parameters: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW, which keeps no temporary copies of the parameters during the step, on CPU and on CUDA.

    Parameters sharded over different device meshes get groups of their own, since a fused call takes one mesh.

    Args:
        parameters: those that require no gradient are left out.
        lr: initial learning rate.
        betas: decay rates of the two moments.
        weight_decay: decoupled weight decay of matrices.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            key = (parameter.dim() >= _DECAY_FROM_DIM, getattr(parameter, "device_mesh", None))
            groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": weight_decay if decays else 0.0} for (decays, _), group in groups.items()],
        lr=lr,
        betas=betas,
        fused=True,
    )


def empty_state(optimizer: torch.optim.AdamW | HostOptimizer) -> None:
    """Creates the optimizer state that AdamW makes at its first step, for a checkpoint to be loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
