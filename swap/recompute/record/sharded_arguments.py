"""Sharded arguments (DTensors) of a layer, rebuilt over fewer tokens.

A rank's local part is an ordinary tensor; tokens are counted and cut there, so a kept range is a prefix of every
rank's. Only with equal parts on all ranks does one part determine the whole.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from memo.swap.tensor_kinds import is_sharded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["Placed", "is_even"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """On which ranks, and along which dimensions divided."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Placed | None:
        """None for a tensor that is no DTensor."""
        if not is_sharded(tensor):
            return None
        return cls(mesh=tensor.device_mesh, placements=tensor.placements)  # type: ignore[attr-defined]

    def over(self, local: torch.Tensor) -> DTensor:
        """The DTensor of which this rank has `local`, and every other as much. Outside of autograd."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local.detach(), self.mesh, self.placements, run_check=False)


def is_even(sharded: DTensor) -> bool:
    """True for replicated or equally sharded dimensions; the same answer on all ranks."""
    from torch.distributed.tensor import Replicate, Shard

    if any(type(placed) not in (Replicate, Shard) for placed in sharded.placements):
        return False
    return tuple(sharded.shape) == _whole(sharded._local_tensor.shape, sharded.placements, sharded.device_mesh)


def _whole(local: Sequence[int], placements: Sequence[Placement], mesh: DeviceMesh) -> tuple[int, ...]:
    """The shape of as many equal parts as there are."""
    parts = [
        math.prod(mesh.size(number) for number, placed in enumerate(placements) if placed.is_shard(dim))
        for dim in range(len(local))
    ]
    return tuple(size * count for size, count in zip(local, parts, strict=True))
