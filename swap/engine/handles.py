"""Handles: the objects that `pack` returns to autograd, with the geometry and the in-place guard of one tensor (R1, R4).

A Handle shares in the life of a storage that may move; a KeptTensor is one that stays; a Sharded wraps either for a DTensor.
Autograd checks version counters itself only without hooks, so each handle notes its tensor's and `unpack` compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch.nn import Parameter

from memo.errors import ModifiedAfterSave
from memo.swap.engine.saved_storage import version_of
from memo.swap.tensor_kinds import is_sharded, local_part

if TYPE_CHECKING:
    from memo.swap.engine.saved_storage import Geometry, Hold


class Guard:
    """Sees in-place changes of a tensor, and holds none of its memory.

    Args:
        tensor: any tensor; a DTensor counts changes of the whole.
    """

    __slots__ = ("_guard", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        guard: Any = tensor.detach() if is_sharded(tensor) else local_part(tensor).detach()
        self._version = version_of(guard)
        if is_sharded(tensor):
            guard._local_tensor = None
        else:
            guard.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._guard: torch.Tensor = guard

    @property
    def is_changed(self) -> bool:
        """True if the tensor was changed since."""
        return version_of(self._guard) != self._version


@final
class Handle:
    """One tensor over a storage that may move: a share in the storage's life, and the tensor's exact geometry in it.

    `guard` is an empty tensor of the same type that shares the saved tensor's version counter and none of its memory.

    Args:
        tensor: the tensor that autograd saves.
        hold: the life of its storage.
        geometry: its offset, size and stride.
        empty: an empty tensor of its dtype and device.
    """

    __slots__ = ("geometry", "guard", "hold", "version")

    def __init__(self, tensor: torch.Tensor, hold: Hold, geometry: Geometry, empty: torch.Tensor) -> None:
        self.hold = hold
        self.geometry = geometry
        self.guard = guard = tensor.detach()
        self.version = guard._version
        guard.data = empty  # of the same type

    def modified(self) -> ModifiedAfterSave:
        """The error to raise when the guard's version is no longer `version`."""
        return _modified(self.geometry[1], self.guard.dtype, self.version, self.guard._version, self.hold.saved.module)


class KeptTensor:
    """A saved tensor that stays on the device; in-place changes are detected all the same (R4)."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A detached alias shares memory and version counter but not the graph: holding the tensor itself would tie an
        # operation's output to its own node for ever. A parameter is the output of no operation.
        self.tensor = tensor if type(tensor) is Parameter else tensor.detach()
        self.version = tensor._version

    def modified(self) -> ModifiedAfterSave:
        """The error to raise when the tensor's version is no longer `version`."""
        return _modified(self.tensor.shape, self.tensor.dtype, self.version, self.tensor._version)


class Sharded:
    """A DTensor: the handle of its local part, and its placement over the device mesh.

    `guard` is a DTensor without a local part that shares the version counter: changes of the whole are not counted at the
    local part (R4).
    """

    __slots__ = ("guard", "kind", "local", "spec", "version")

    def __init__(self, tensor: torch.Tensor, local: Handle | KeptTensor) -> None:
        self.kind: Any = type(tensor)
        self.spec = tensor._spec  # type: ignore[attr-defined]
        self.local = local
        guard: Any = tensor.detach()
        guard._local_tensor = None
        self.guard: torch.Tensor = guard
        self.version = self.guard._version

    def modified(self) -> ModifiedAfterSave:
        """The error to raise when the guard's version is no longer `version`."""
        return _modified(self.guard.shape, self.guard.dtype, self.version, self.guard._version)

    def rebuild(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the DTensor over `local`."""
        whole: torch.Tensor = self.kind(local, self.spec, requires_grad=False)
        return whole


Packed = Handle | KeptTensor | Sharded
"""The result of `Engine.pack`."""


def _modified(
    shape: torch.Size, dtype: torch.dtype, saved: int, now: int, module: str | None = None
) -> ModifiedAfterSave:
    where = f" in {module}" if module else ""
    return ModifiedAfterSave(
        f"a tensor{where} of shape {tuple(shape)} and type {dtype} that backward needs was changed in place after it was "
        f"saved (version {now}, saved at version {saved}); use an out-of-place operation, or change it before it is used"
    )
