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

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SavingHooks"]


class SavingHooks(graph.saved_tensors_hooks):
    """Hooks for saved tensors, as torch's own."""

    def __enter__(self) -> None:
        global _original
        super().__enter__()
        with _wrapping:
            _set.append(self)
            if graph.disable_saved_tensors_hooks is not _disabled:
                _original, graph.disable_saved_tensors_hooks = graph.disable_saved_tensors_hooks, _disabled

    def __exit__(self, *exception: object) -> None:
        with _wrapping:
            _set.remove(self)
            if not _set and graph.disable_saved_tensors_hooks is _disabled:
                graph.disable_saved_tensors_hooks = _original
        super().__exit__(*exception)


_set: list[SavingHooks] = []
_wrapping = threading.RLock()
_original = graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _disabled(error_message: str) -> Iterator[None]:
    """Takes our hooks off while there must be none; those that a program has set over them are torch's matter."""
    taken: list[Any] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None and _is_ours(top):
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(top)
    try:
        with _original(error_message):
            yield
    finally:
        for hooks in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _is_ours(hooks: Any) -> bool:
    return any(hooks[1] == one.unpack_hook for one in list(_set))
