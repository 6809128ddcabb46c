"""Tensors that the program keeps on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from weakref import ref

import torch

from memo.swap.layers import is_transformed, runs_as_written
from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import has_storage, local_part

if TYPE_CHECKING:
    from typing import Any

_Tensor = TypeVar("_Tensor", bound="torch.Tensor")

_kept = StorageMap()


def keep(tensor: _Tensor) -> _Tensor:
    """Keeps a tensor on the device: its memory neither moves nor is recomputed.

    For what is needed again soon, or by many layers, as a mask or the encoder's output. It costs its bytes until autograd is
    done with it, beyond what a plan has counted. Call it where the tensor was just made: a copy out that has begun is
    not called back.

        states = memo.keep(self.encoder(tokens))

    Args:
        tensor: of any shape and dtype. All tensors in the same memory are kept with it.

    Returns:
        The tensor itself.
    """
    if runs_as_written() and not is_transformed():
        local: Any = local_part(tensor)
        if has_storage(local):
            _kept[local.untyped_storage()] = True
    return tensor


def is_kept(storage: torch.UntypedStorage) -> bool:
    """True for memory of a tensor that `keep` was called with."""
    return bool(_kept) and _kept.find(ref(storage)) is not None
