"""Layers of a model that its manager does not see, or not whole: found in the first forwards, and said once.

    called without hooks     the model calls `layer.forward(x)` itself
    compiled as a whole      no layer runs by itself. One compiled function has one backward, which takes all that was saved
                             at once: moving it would spare nothing
    checkpointed             torch.utils.checkpoint runs it, or a part of it, again in backward: one that is not known to be
                             around the layer (replaced_checkpoints.py), or that saves by hooks of others

Layers of the first two kinds are known by their parameters: autograd saves them while no layer is open. A layer that a model
skips (layer drop, an encoder that this batch does not need) saves none, and is not taken for one.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memo.swap import has_storage, local_part, parameter_behind, runs_as_written
from memo.torch_private import AOT_AUTOGRAD, current_graph_task_id
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from memo.swap import Layer

_WATCHED = 3
"""Forwards in which something is saved, until it is clear how the model calls its layers."""

_CALLED = "the model calls layer.forward(x) instead of layer(x), or was traced"
_COMPILED = (
    "the model is compiled as a whole, which runs no layer by itself; compile its layers instead: "
    "for layer in manager.layers: layer.module.compile()"
)

_CHECKPOINTED = (
    "its own activation checkpointing recomputes it or a part of it; turn that off, or use use_reentrant=False around whole "
    "layers, which memo replaces"
)
_HIDDEN = "its activation checkpointing offloads what it saves by itself; turn that off, memo replaces it"

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
        self._is_within_checkpoints = False  # what runs outside of layers is checkpointed
        self._saving: set[str] = set()  # layers in which something was saved
        self._left = _WATCHED
        self._has_told = False  # of checkpoints that stay

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
            elif runs_as_written() and current_graph_task_id() < 0:
                self._saving.add("")
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
        if self._is_within_checkpoints:
            self.reasons.update(dict.fromkeys((name for name in seen if name not in self._saving), _CHECKPOINTED))
        self._owners, self._is_within_checkpoints = {}, False
        self._outside.clear()
        self._saving.clear()
        for reason in dict.fromkeys(found.values()):
            named = _named([name for name, why in found.items() if why == reason])
            warn_user(f"{named} ran without hooks, and nothing of it is managed: {reason}")
        checkpointed = [name for name, why in self.reasons.items() if why == _CHECKPOINTED]
        if checkpointed and not self._has_told:
            self._has_told = True
            warn_user(f"not managed, or not as a whole: {_named(checkpointed)}; {_CHECKPOINTED}")

    def checkpoint_begins(self, open_layer: str | None, around: Collection[str]) -> None:
        """Notes a checkpoint that stays, and warns once of those that save by hooks of others.

        Args:
            open_layer: the layer that runs; None where none does.
            around: layers that the checkpoint is around, though hooks of others are set.
        """
        if around:
            if _HIDDEN not in self.reasons.values():
                warn_user(f"{next(iter(around))} is not managed: {_HIDDEN}")
            self.reasons.update(dict.fromkeys(around, _HIDDEN))
        elif open_layer is not None:
            self.reasons[open_layer] = _CHECKPOINTED
        else:
            self._is_within_checkpoints = True


def _named(layers: Sequence[str]) -> str:
    return f"{layers[0]} and {len(layers) - 1} more" if len(layers) > 1 else layers[0]


def _is_compiled() -> bool:
    """True while a compiled function saves: its wrappers are callers then."""
    callers = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(caller.startswith(AOT_AUTOGRAD) for caller in callers)


def _addresses(tensor: torch.Tensor) -> list[int]:
    """Addresses by which a parameter is known again in its views and casts: of itself, and of its storage object."""
    local, behind = local_part(tensor), parameter_behind(tensor)
    found = [id(tensor if behind is None else behind)]
    return [*found, local.untyped_storage()._cdata] if has_storage(local) else found
