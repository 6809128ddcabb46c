"""Takes one of our dispatch modes out of the way for a moment: what the engine does then is no part of the layer."""

from __future__ import annotations

from typing import Protocol

from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

__all__ = ["Aside"]


class _Mode(Protocol):
    asleep: bool
    """Passes every call on. Only for when another mode lies above this one, which then cannot be taken off."""


class Aside:
    """`with Aside(mode):` around the engine's own operators. Off the stack they cost nothing; asleep, 10 us each."""

    __slots__ = ("_is_off", "_mode")

    def __init__(self, mode: _Mode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._is_off = _get_current_dispatch_mode() is self._mode
        if self._is_off:
            _pop_mode()
        else:
            self._mode.asleep = True

    def __exit__(self, *exception: object) -> None:
        if self._is_off:
            _push_mode(self._mode)  # type: ignore[arg-type]
        else:
            self._mode.asleep = False
