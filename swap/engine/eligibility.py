"""Offload eligibility: whether a packed tensor may leave the device (R3), and which SavedStorage tracks its storage (R2).

It owns the record of each storage: its SavedStorage, held weakly, or that it never moves. The rules are in capture.
A storage that was found to stay is not looked at again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

import torch

from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import cast_of_parameter, is_sharded, local_part, never_moves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memo.swap.engine.saved_storage import Group, SavedStorage

__all__ = ["STAYS", "Eligibility"]

STAYS = object()  # what is known of a storage that never moves


class Eligibility:
    """Of one engine on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.known = StorageMap()
        """Storage -> a weak reference to the hold on its life, or STAYS."""
        self._device = device
        # How many elements each parameter has, and of which types: a cast of one has as many, of another type.
        self._parameter_types: dict[int, set[torch.dtype]] = {}
        # Some are DTensors. What a layer makes of one has a size of its own, and data parallelism frees its memory under us.
        self._sharded = False

    def keep(self, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """Names a model's parameters and buffers, whose storages never move.

        What replaces them later is found again by looking at the tensors themselves; this is the quick way.
        """
        for tensor in (*parameters, *buffers):
            if isinstance(tensor, torch.nn.Parameter):
                self._parameter_types.setdefault(tensor.numel(), set()).add(tensor.dtype)
                self._sharded = self._sharded or is_sharded(tensor)
            local = local_part(tensor)
            if type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout is torch.strided:
                self.known[local.untyped_storage()] = STAYS

    def stays(self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int, group: Group) -> bool:
        """Whether the storage of a plain strided tensor never moves."""
        if not (storage in group.external or tensor.device != self._device or never_moves(tensor)):
            types = self._parameter_types.get(nbytes // tensor.itemsize)
            seldom = types is None or types == {tensor.dtype}
            if (seldom and not self._sharded) or not cast_of_parameter(tensor):
                return False
        self.known[storage] = STAYS
        return True

    def saved_as(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """The life of a storage that autograd saved."""
        known = self.known.find(ref(storage))
        hold = None if known is None or known is STAYS else known()
        return None if hold is None else hold.saved
