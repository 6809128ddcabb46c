"""Takes one of our dispatch modes out of the way for a moment: what the engine does then is no part of the layer."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

__all__ = ["Aside", "SleepingMode"]


class SleepingMode(TorchDispatchMode):
    """A mode that passes every call on while it is asleep."""

    asleep = False
    supports_higher_order_operators = True  # they are passed on as any operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled: run operator by operator it would round in another way."""
        return True


class Aside:
    """`with Aside(mode):` around the engine's own operators.

    Taken off the stack the mode costs them nothing. Where another mode lies above, it is put to sleep: some 10 us each.
    """

    __slots__ = ("_is_off", "_mode")

    def __init__(self, mode: SleepingMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._is_off = _get_current_dispatch_mode() is self._mode
        if self._is_off:
            _pop_mode()
        else:
            self._mode.asleep = True

    def __exit__(self, *exception: object) -> None:
        if self._is_off:
            _push_mode(self._mode)
        else:
            self._mode.asleep = False
