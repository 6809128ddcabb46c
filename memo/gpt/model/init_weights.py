"""Initial weights of a GPT, equal in every layout: each parameter is drawn from the seed and its own name.

A rank draws one whole parameter at a time and keeps its part. A model larger than a rank's memory never exists whole, and
the weights do not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from memo.gpt.config import GPTConfig

INIT_STD = 0.02  # Radford et al. 2019 (GPT-2)
_RESIDUAL = (".out.weight", ".down.weight", ".ascend.weight")


def seed_of(*parts: object) -> int:
    """Seed hashed from names and numbers; the same on every machine."""
    name = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


@torch.no_grad()
def initialise(model: nn.Module, config: GPTConfig, seed: int) -> None:
    """Fills the parameters in place by GPT-2's initialisation.

    Weights are normal with standard deviation INIT_STD, divided by sqrt(2 layers) in residual projections; biases are 0 and
    norm gains are 1.

    Args:
        model: a GPT, or a rank's part of one with the parameter names of the whole.
        config: shape of the whole model.
        seed: seed of all weights.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            std = INIT_STD / math.sqrt(2 * config.layers) if name.endswith(_RESIDUAL) else INIT_STD
            _copy_own_part(parameter, _draw(parameter, std, seed_of(seed, name)))
        else:
            _copy_own_part(parameter, 0.0 if name.endswith(".bias") else 1.0)


def _draw(parameter: torch.Tensor, std: float, seed: int) -> torch.Tensor:
    generator = torch.Generator(device=parameter.device).manual_seed(seed)
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return whole.normal_(std=std, generator=generator)


def _copy_own_part(parameter: torch.Tensor, value: torch.Tensor | float) -> None:
    local = getattr(parameter, "_local_tensor", parameter)
    if isinstance(value, float):
        local.fill_(value)
    elif local is parameter:
        local.copy_(value)
    else:
        local.copy_(value[_own_part(parameter)])


def _own_part(parameter: torch.Tensor) -> tuple[slice, ...]:
    """Slices of this rank's part of a DTensor in the whole tensor."""
    from torch.distributed.tensor import DTensor

    from memo.torch_private import compute_local_shape_and_global_offset

    assert isinstance(parameter, DTensor)
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))
