"""Layers of a model that its manager does not see, or not whole: found in the first forwards, and said once.

    called without hooks     the model calls `layer.forward(x)` itself
    compiled as a whole      no layer runs by itself. One compiled function has one backward, which takes all that was saved
                             at once: moving it would spare nothing
    checkpointed             torch.utils.checkpoint around or within a layer runs it again in backward; what selective
                             checkpointing keeps meanwhile never passes the hooks for saved tensors

Layers of the first two kinds are known by their parameters: autograd saves them while no layer is open. A layer that a model
skips (layer drop, an encoder that this batch does not need) saves none, and is not taken for one.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memo.swap import has_storage, local_part, parameter_behind, runs_as_written
from memo.torch_private import AOT_AUTOGRAD, current_graph_task_id, tree_leaves
from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.swap import Layer

__all__ = ["Unseen"]

_WATCHED = 3
"""Forwards in which something is saved, until it is clear how the model calls its layers."""

_CALLED = "the model calls layer.forward(x) instead of layer(x), or was traced"
_COMPILED = (
    "the model is compiled as a whole, which runs no layer by itself; compile its layers instead: "
    "for layer in manager.layers: layer.module.compile()"
)

_CHECKPOINTED = "activation checkpointing of its own runs it again; turn it off, memo replaces it"

_Pack = Callable[["torch.Tensor"], Any]


class Unseen:
    """Watches the first forwards of a model.

    Args:
        layers: the managed layers.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.reasons: dict[str, str] = {}
        """Layer -> why it is not managed, or not all of it."""
        self._unseen = {layer.name: layer for layer in layers}
        self._owners: dict[int, str] = {}  # a parameter, or its storage object, by address -> layer
        self._outside: dict[str, str] = {}
        self._checkpointed: dict[str, list[Any]] = {}  # layer -> what its selective checkpointing stores
        self._is_within_checkpoints = False  # what runs outside of layers saves for checkpoints
        self._saving: set[str] = set()  # layers in which something was saved
        self._left = _WATCHED

    def watch(self, pack: _Pack, open_layer: Callable[[], str | None]) -> _Pack:
        """Returns the pack hook for one forward: `pack` itself once all is known.

        Args:
            pack: of saved tensors.
            open_layer: name of the layer that runs, whose hooks have run; None where none does.
        """
        if not self._left:
            return pack
        self._owners = {
            address: name
            for name, layer in self._unseen.items()
            for parameter in layer.module.parameters()
            for address in _addresses(parameter)
        }

        def watching(tensor: torch.Tensor) -> Any:
            layer = open_layer()
            if layer is not None:
                self._saving.add(layer)
                if _checkpoint_frames():
                    self._note_checkpoint(layer)
            elif runs_as_written() and current_graph_task_id() < 0:
                self._saving.add("")
                self._is_within_checkpoints |= bool(_checkpoint_frames())
                for address in _addresses(tensor):
                    if address in self._owners and self._owners[address] not in self._outside:
                        self._outside[self._owners[address]] = _COMPILED if _is_compiled() else _CALLED
            return pack(tensor)

        return watching

    def end(self, seen: Collection[str]) -> None:
        """Ends a forward, and warns of layers that ran without their hooks in it.

        Args:
            seen: names of the layers whose hooks have run.
        """
        if not self._left:
            return
        self._left -= bool(self._saving)
        found = {name: self._outside[name] for name in self._unseen if name in self._outside and name not in seen}
        for name in (*seen, *found):
            self._unseen.pop(name, None)
        self.reasons.update(found)
        self._count_checkpoints()
        if self._is_within_checkpoints:
            self.reasons.update(dict.fromkeys((name for name in seen if name not in self._saving), _CHECKPOINTED))
        self._owners, self._is_within_checkpoints = {}, False
        self._outside.clear()
        self._saving.clear()
        for reason in dict.fromkeys(found.values()):
            names = [name for name, why in found.items() if why == reason]
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(
                f"{names[0]}{others} ran without hooks, and nothing of it is managed: {reason}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _note_checkpoint(self, layer: str) -> None:
        """Notes where the policy of a checkpoint that begins in a layer stores what is not run again."""
        stores = self._checkpointed.setdefault(layer, [])
        for frame in _checkpoint_frames():
            store = getattr(frame.f_locals.get("forward_context"), "storage", None)
            if store is not None and all(store is not other for other in stores):
                stores.append(store)

    def _count_checkpoints(self) -> None:
        for layer, stores in self._checkpointed.items():
            stored = {
                tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                for tensor in tree_leaves([_values(store) for store in stores])
                if isinstance(tensor, torch.Tensor) and has_storage(tensor)
            }
            kept = f", and keeps {format_bytes(sum(stored.values()))} on the device meanwhile" if stored else ""
            self.reasons[layer] = _CHECKPOINTED.replace(";", f"{kept};")
        self._checkpointed.clear()


def _checkpoint_frames() -> list[FrameType]:
    """Callers in torch.utils.checkpoint, while a checkpoint saves the arguments of what it is about to run."""
    found = []
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code is nn.Module._call_impl.__code__:
            break
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            found.append(frame)
    return found


def _values(stored: Any) -> Any:
    """The values in torch's store of a selective checkpoint: by operator and call, each in a wrapper with its version."""
    if isinstance(stored, Mapping):
        return [_values(value) for value in stored.values()]
    if isinstance(stored, (list, tuple)):
        return [_values(value) for value in stored]
    return getattr(stored, "val", None)


def _is_compiled() -> bool:
    """True while a compiled function saves: its wrappers are callers then."""
    callers = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(caller.startswith(AOT_AUTOGRAD) for caller in callers)


def _addresses(tensor: torch.Tensor) -> list[int]:
    """Addresses by which a parameter is known again in its views and casts: of itself, and of its storage object."""
    local, behind = local_part(tensor), parameter_behind(tensor)
    found = [id(tensor if behind is None else behind)]
    return [*found, local.untyped_storage()._cdata] if has_storage(local) else found
