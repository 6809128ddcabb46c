"""Claims of managers on layers, entered in a thread or attached: two at once would each save half of a layer."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from memo.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from memo.manager.manager import Manager


class _Entered(threading.local):
    def __init__(self) -> None:
        self.managers: list[Manager] = []


_entered = _Entered()
_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Manager]] = weakref.WeakKeyDictionary()


def enter(manager: Manager) -> None:
    """Notes that this thread enters a manager."""
    _entered.managers.append(manager)


def entered() -> list[Manager]:
    """Managers that this thread has entered, outermost first."""
    return _entered.managers


def is_within_layer() -> bool:
    """True in a thread that runs a layer of a manager."""
    return any(manager.open_layer is not None for manager in _entered.managers)


def require_alone(manager: Manager) -> None:
    """Call it in the thread that has entered the manager, before a forward.

    Raises:
        UsageError: the thread is in another manager, too, that has some of the same layers, or is within a layer of it.
    """
    if len(_entered.managers) < 2:
        return
    ours = {layer.module for layer in manager.layers}
    for other in _entered.managers:
        if other is manager:
            continue
        shared = next((layer.name for layer in other.layers if layer.module in ours), None)
        if shared is not None:
            raise UsageError(f"{shared} is in another manager's care here; leave that `with`, or detach that manager")
        if other.open_layer is not None:
            raise UsageError(
                f"this forward runs inside {other.open_layer}, a layer of another manager; let one manager have both: "
                "memo.offload(model, layers=[...])"
            )


def leave(manager: Manager) -> None:
    """Notes that this thread has left a manager."""
    if manager in _entered.managers:
        _entered.managers.remove(manager)


def attached_to(manager: Manager) -> list[Manager]:
    """The other managers that are attached to some of a manager's layers."""
    known = (_attached.get(layer.module) for layer in manager.layers)
    found = {other for one in known if one is not None and (other := one()) is not None and other is not manager}
    return list(found)


def claim(manager: Manager) -> None:
    """Notes that a manager is attached."""
    for layer in manager.layers:
        _attached[layer.module] = weakref.ref(manager)


def release(manager: Manager) -> None:
    """Notes that it is not any more."""
    for layer in manager.layers:
        known = _attached.get(layer.module)
        if known is not None and known() is manager:
            del _attached[layer.module]
