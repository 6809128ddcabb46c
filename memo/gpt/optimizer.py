"""AdamW with the usual two groups: matrices decay, vectors (norms and biases) do not."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["adamw", "empty_state"]

# Decay pulls weights of matrix products towards zero; on a norm's gain it would pull towards a layer that outputs zero.
_DECAY_FROM_DIM = 2


def adamw(model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """One fused AdamW; fused keeps no temporary copies of the parameters during the step, on CPU as on CUDA."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= _DECAY_FROM_DIM], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < _DECAY_FROM_DIM], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


def empty_state(optimizer: torch.optim.AdamW) -> None:
    """Gives every parameter the state AdamW makes at its first step, for a checkpoint to be read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
