"""Division of stacked expert matrices over expert-parallel ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

__all__ = ["divide_experts", "own_experts"]


def divide_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces parameters (experts, ...) of a module by DTensors of this rank's experts; does not communicate.

    Args:
        module: the experts, whose number divides by the ranks.
        mesh: the expert-parallel ranks, one dimension.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            own = parameter.detach().chunk(mesh.size(), 0)[mesh.get_local_rank()].clone()
            whole = DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            setattr(part, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def own_experts(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's experts, (experts of a rank, ...), of a parameter; the whole of one that is not divided.

    Backward divides the gradient by the number of expert-parallel ranks. It has the rows of all of them in it, so its mean
    over ranks with the same experts would else be that many times the mean over all data-parallel ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    local, ranks = parameter.to_local(), parameter.device_mesh.size()
    if local.requires_grad:
        local.register_hook(lambda grad: grad / ranks)  # on the parameter's own memory, which memo knows not to move
    return local
