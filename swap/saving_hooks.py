"""Hooks for saved tensors that stand aside where torch allows none: in torch.func's `grad`, `vjp` and `jacrev`.

A transform within a managed forward, or in a layer, would be an error of torch's while hooks are set. What it saves stays on
the device, as without memo. torch offers no hook there, so that the function through which it forbids hooks is wrapped while
ours are set.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import graph

from memo.forks import free_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["SavingHooks"]

_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks


class SavingHooks:
    """A pair of this thread's hooks for saved tensors, between `install` and `remove`.

    Unlike torch's own context they are taken off by what is there: also where an interruption has left a part of them.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pack, self.unpack = pack, unpack

    def install(self) -> None:
        """Sets the hooks; `remove` must follow."""
        global _original
        with _wrapping:
            _set.append(self)
            if graph.disable_saved_tensors_hooks is not _disabled:
                _original, graph.disable_saved_tensors_hooks = graph.disable_saved_tensors_hooks, _disabled
        _push(self._pack, self.unpack)

    def remove(self) -> None:
        """Takes off what is set of them on top of the stack. Idempotent."""
        while (hooks := _top()) is not None and hooks[1] == self.unpack:
            _pop()
        with _wrapping:
            _set[:] = [other for other in _set if other is not self]
            if not _set and graph.disable_saved_tensors_hooks is _disabled:
                graph.disable_saved_tensors_hooks = _original


_set: list[SavingHooks] = []
_wrapping = free_in_child(threading.RLock())
_original = graph.disable_saved_tensors_hooks


def _top() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@contextlib.contextmanager
def _disabled(error_message: str) -> Iterator[None]:
    """Takes our hooks off while there must be none; those that a program has set over them are torch's matter."""
    taken: list[Any] = []
    try:
        while (top := _top()) is not None and any(top[1] == one.unpack for one in list(_set)):
            taken.append(top)
            _pop()
        with _original(error_message):
            yield
    finally:
        for hooks in reversed(taken):
            _push(*hooks)
