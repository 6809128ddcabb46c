"""Layers that run without their hooks: a model may call `layer.forward(x)` itself, or be compiled as a whole.

Then nothing of a layer is managed. (One compiled function has one backward, which takes all that was saved at once: moving
it would spare nothing.) Such a layer is known by its parameters: autograd saves them in its forward, while no layer is open.
A layer that a model skips (layer drop, an encoder that this batch does not need) saves none, and is not taken for one. Only
the first forwards are watched, and of them only layers whose hooks have not run.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from memo.swap import has_storage, local_part, parameter_behind

if TYPE_CHECKING:
    import torch

    from memo.swap import Layer

__all__ = ["DirectCalls"]

_WATCHED = 3
"""Forwards in which something is saved, until it is clear how the model calls its layers."""

_CALLED = "the model calls layer.forward(x) instead of layer(x)"
_COMPILED = (
    "the model is compiled as a whole, which runs no layer by itself; compile its layers instead: "
    "for layer in manager.layers: layer.module.compile()"
)

_Pack = Callable[["torch.Tensor"], Any]


class DirectCalls:
    """Watches the first forwards of a model for layers that run without their hooks.

    Args:
        layers: the managed layers.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.reasons: dict[str, str] = {}
        """Layer -> why it is not managed, for layers that ran without their hooks."""
        self._unseen = {layer.name: layer for layer in layers}
        self._owners: dict[int, str] = {}  # a parameter, or its storage object, by address -> layer
        self._outside: dict[str, str] = {}
        self._left = _WATCHED
        self._has_saved = False

    def watch(self, pack: _Pack, is_open: Callable[[], bool]) -> _Pack:
        """Returns the pack hook for one forward: `pack` itself once all is known.

        Args:
            pack: of saved tensors.
            is_open: true while a layer runs whose hooks have run.
        """
        if not self._unseen or not self._left:
            return pack
        self._owners = {
            address: name
            for name, layer in self._unseen.items()
            for parameter in layer.module.parameters()
            for address in _addresses(parameter)
        }

        def watching(tensor: torch.Tensor) -> Any:
            self._has_saved = True
            if not is_open():
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
        if not self._unseen or not self._left:
            return
        self._left -= self._has_saved
        found = {name: self._outside[name] for name in self._unseen if name in self._outside and name not in seen}
        for name in (*seen, *found):
            self._unseen.pop(name, None)
        self.reasons.update(found)
        self._owners, self._has_saved = {}, False
        self._outside.clear()
        for reason in dict.fromkeys(found.values()):
            names = [name for name, why in found.items() if why == reason]
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(
                f"{names[0]}{others} ran without hooks, and nothing of it is managed: {reason}",
                RuntimeWarning,
                stacklevel=3,
            )


def _is_compiled() -> bool:
    """True while a compiled function saves: its wrappers are callers then."""
    callers = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None))
    return any(caller.startswith("torch._functorch._aot_autograd") for caller in callers)


def _addresses(tensor: torch.Tensor) -> list[int]:
    """Addresses by which a parameter is known again in its views and casts: of itself, and of its storage object."""
    local, behind = local_part(tensor), parameter_behind(tensor)
    found = [id(tensor if behind is None else behind)]
    return [*found, local.untyped_storage()._cdata] if has_storage(local) else found
