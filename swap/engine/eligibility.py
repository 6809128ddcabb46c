"""Offload eligibility: whether a packed tensor may leave the device (R3), and which SavedStorage tracks its storage (R2).

It owns the record of each storage: a weak reference to its Hold, or STAYS. The rules are in memo.swap.tensor_kinds.
A storage that was found to stay is not examined again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

import torch

from memo.swap.kept import is_kept
from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import cast_of_parameter, has_storage, is_sharded, local_part, never_moves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memo.swap.engine.layer_calls import Group
    from memo.swap.engine.saved_storage import SavedStorage

STAYS = object()  # the record of a storage that never moves


class Eligibility:
    """Storages known to an engine on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.known = StorageMap()
        """Storage -> weak reference to its Hold, or STAYS."""
        self._device = device
        # Dtypes of the parameters by number of elements: a cast of a parameter has as many elements of another dtype.
        self._parameter_types: dict[int, set[torch.dtype]] = {}
        self.is_complete = True
        """False where others may be casts of parameters, too: of parameters that nobody has told, and of DTensors, whose
        full tensors have sizes of their own, and whose memory data parallelism frees under us."""

    def keep(self, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """Registers a model's parameters and buffers, whose storages never move.

        Only a fast path: `stays` recognises parameters that replace them later by the tensors themselves.
        """
        for tensor in (*parameters, *buffers):
            if isinstance(tensor, torch.nn.Parameter):
                self._parameter_types.setdefault(tensor.numel(), set()).add(tensor.dtype)
                self.is_complete = self.is_complete and not is_sharded(tensor)
            local = local_part(tensor)
            if type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout is torch.strided:
                self.known[local.untyped_storage()] = STAYS

    def stays(self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int, group: Group) -> bool:
        """True if the storage of a plain strided tensor never moves (R3); records the answer."""
        moves = not (storage in group.external or tensor.device != self._device or never_moves(tensor))
        if moves and not is_kept(storage):
            types = self._parameter_types.get(nbytes // tensor.itemsize)
            if types is None and self.is_complete:
                return False
            no_cast = types is None or types == {tensor.dtype}
            if no_cast and self.is_complete:
                return False
            if not cast_of_parameter(tensor) and (self.is_complete or not _is_of_parameter(storage, group)):
                return False
        self.known[storage] = STAYS
        return True

    def saved_as(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """Returns the SavedStorage of a storage; None where it stays, is unknown, or has no handle left."""
        known = self.known.find(ref(storage))
        hold = None if known is None or known is STAYS else known()
        return None if hold is None else hold.saved


def _is_of_parameter(storage: torch.UntypedStorage, group: Group) -> bool:
    """Whether a parameter of the running modules is in this memory now: FSDP gathers sharded ones, and frees it again.

    Of frozen ones autograd knows nothing.
    """
    parameters = (one for module in group.modules for one in module.parameters())
    return any(has_storage(local) and local.untyped_storage() is storage for local in map(local_part, parameters))
