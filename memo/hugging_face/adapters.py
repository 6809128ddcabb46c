"""Adapters on the linear maps of a model's layers, so that a step with them can be recorded: LoRA (Hu et al. 2021).

Owns what PEFT does to a module with `target_modules="all-linear"`, without dropout: `W x + s B A x`, where W is frozen, in
the adapters' dtype and cast back. Fused tensors of experts are no linear maps, and get none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from memo.errors import UsageError


class AdaptedLinear(nn.Linear):
    """Linear map with a frozen weight and an adapter."""

    down: nn.Parameter
    up: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The map's result and the adapter's, added."""
        adapted = F.linear(F.linear(input.to(self.down.dtype), self.down), self.up) * 2.0
        return (super().forward(input) + adapted).to(input.dtype)


def adapt(model: nn.Module, layers: Iterable[nn.Module], rank: int, *, name: str, dtype: torch.dtype) -> None:
    """Freezes a model but for its embedding, and puts adapters on the layers' linear maps, in place.

    The embedding stays trained in what is recorded, so that the first layer's input has a gradient, as every other layer's.

    Args:
        model: the model.
        layers: its repeated layers.
        rank: of the adapters.
        name: of the model in error messages.
        dtype: of the adapters.

    Raises:
        UsageError: the layers have no linear maps.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    kept = set() if embedding is None else set(embedding.parameters())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in kept)
    found = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]
    if not found:
        raise UsageError(f"{name}: its layers have no linear maps to put adapters on")
    for module in found:
        module.__class__ = AdaptedLinear
        weight = module.weight
        for part, shape in (("down", (rank, module.in_features)), ("up", (module.out_features, rank))):
            module.register_parameter(part, nn.Parameter(torch.empty(shape, dtype=dtype, device=weight.device)))
