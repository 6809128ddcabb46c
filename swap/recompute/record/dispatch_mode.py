"""Base dispatch mode over plain local tensors; `Aside` suspends a mode while the engine runs operators of its own.

A mode sees the operators on this rank's plain tensors. DTensor's own dispatch goes first and comes back with local
parts and the collectives between them; operators on fake tensors, which it runs to infer shapes, are not passed on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from memo.swap.recompute.axis.operators import Given
from memo.swap.tensor_kinds import are_wrapped

__all__ = ["Aside", "SleepingMode"]


class SleepingMode(TorchDispatchMode):
    """A mode that passes every call on while it is asleep, and else has it `called`."""

    asleep = False
    supports_higher_order_operators = True  # they are passed on as any operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled under the mode: run operator by operator they would round differently."""
        return True

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and are_wrapped(types):
            return NotImplemented
        kwargs = kwargs or {}
        if self.asleep or _asked_for_shapes():
            return func(*args, **kwargs)
        given = Given(func, args, kwargs)
        return given.call() if given.operator.awaits else self.called(given)

    def called(self, given: Given) -> Any:
        """Calls an operator on plain tensors."""
        raise NotImplementedError


def _asked_for_shapes() -> bool:
    """True while operators run on fake tensors, to infer shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class Aside:
    """`with Aside(mode):` around the engine's own operators.

    Taken off the stack the mode costs them nothing. Where another mode lies above, it is put to sleep: some 10 us each.
    """

    __slots__ = ("_is_off", "_mode", "_was_asleep")

    def __init__(self, mode: SleepingMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._is_off = _get_current_dispatch_mode() is self._mode
        if self._is_off:
            _pop_mode()
        else:
            self._was_asleep = self._mode.asleep
            self._mode.asleep = True

    def __exit__(self, *exception: object) -> None:
        if self._is_off:
            _push_mode(self._mode)
        else:
            self._mode.asleep = self._was_asleep
