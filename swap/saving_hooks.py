"""Hooks for saved tensors that stand aside where there must be none: in torch.func's `grad`, `vjp` and `jacrev`.

A transform within a managed forward, or in a layer, would be an error of torch's while hooks are set. What it saves stays on
the device, as without memo. torch has no hook for that, so its two functions that forbid and allow hooks are replaced by
wrappers once, when this module is imported; Dynamo's graphs call the wrappers, too.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from memo.swap.dynamo import keep_from_dynamo
from memo.torch_private import (
    found,
    place,
    pop_saved_tensors_default_hooks,
    push_saved_tensors_default_hooks,
    saved_tensors_hooks_get_disabled_error_message,
    top_saved_tensors_default_hooks,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_forbid, _allow = found("saved_tensors_hooks_disable"), found("saved_tensors_hooks_enable")


class SavingHooks:
    """A pair of this thread's hooks for saved tensors, between `install` and `remove`.

    Unlike torch's own context, `remove` looks for the pair on the stack: it works after an interruption, and with others set
    above it.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pair = pack, unpack

    def install(self) -> None:
        """Sets the hooks; `remove` must follow."""
        for hook in self._pair:
            keep_from_dynamo(hook)
        _installed.append(self)
        if saved_tensors_hooks_get_disabled_error_message() is None:
            self.push()
        else:
            _thread.aside.append(self)

    def remove(self) -> None:
        """Takes off what is set of them. Idempotent."""
        if self not in _installed:
            return
        others = []
        while (top := _top()) is not None:
            pop_saved_tensors_default_hooks()
            if self._is(top):
                break
            others.append(top)
        for other in reversed(others):
            push_saved_tensors_default_hooks(*other)
        _installed.remove(self)

    @property
    def are_topmost(self) -> bool:
        """False where others, set later, get what is saved now."""
        top = _top()
        return top is not None and self._is(top)

    def push(self) -> None:
        """Sets them on top of the stack."""
        push_saved_tensors_default_hooks(*self._pair)

    def _is(self, pair: Any) -> bool:
        return bool(pair[1] == self._pair[1])  # bound methods are equal, not identical


class _Thread(threading.local):
    """Hooks that stand aside in this thread, the lowest first."""

    def __init__(self) -> None:
        self.aside: list[SavingHooks] = []


_thread = _Thread()
_installed: list[SavingHooks] = []
"""Hooks of all threads: torch sets those of a thread in its backward's threads, too."""


def _top() -> Any:
    return top_saved_tensors_default_hooks(False)


def _forbid_hooks(message: str, fail_if_non_empty: bool = True) -> None:
    """Forbids hooks, once ours are off; those that a program has set over them are torch's matter."""
    aside = []
    while fail_if_non_empty and (top := _top()) is not None and (ours := _ours(top)) is not None:
        pop_saved_tensors_default_hooks()
        aside.append(ours)
    try:
        _forbid(message, fail_if_non_empty)
    except BaseException:
        for ours in reversed(aside):
            ours.push()
        raise
    _thread.aside += reversed(aside)


def _allow_hooks() -> None:
    """Allows hooks, and sets ours again that are still installed."""
    _allow()
    aside, _thread.aside = _thread.aside, []
    for ours in aside:
        if ours in _installed:
            ours.push()


def _ours(pair: Any) -> SavingHooks | None:
    return next((ours for ours in list(_installed) if ours._is(pair)), None)


setattr(*place("saved_tensors_hooks_disable"), _forbid_hooks)
setattr(*place("saved_tensors_hooks_enable"), _allow_hooks)
