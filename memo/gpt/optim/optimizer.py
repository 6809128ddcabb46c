"""AdamW with the usual two groups: matrices decay, vectors (norms and biases) do not."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["adamw", "empty_state"]

# Decay pulls weights of matrix products towards zero; on a norm's gain it would pull towards a layer that outputs zero.
_DECAY_FROM_DIM = 2


def adamw(model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """One fused AdamW; fused keeps no temporary copies of the parameters during the step, on CPU as on CUDA.

    Parameters that are sharded over different meshes stand in groups of their own: one fused call takes one mesh.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            key = (parameter.dim() >= _DECAY_FROM_DIM, getattr(parameter, "device_mesh", None))
            groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
            for (decays, _), parameters in groups.items()
        ],
        lr=lr,
        betas=betas,
        fused=True,
    )


def empty_state(optimizer: torch.optim.AdamW) -> None:
    """Gives every parameter the state AdamW makes at its first step, for a checkpoint to be read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
