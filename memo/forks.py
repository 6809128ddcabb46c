"""Forked processes, such as a data loader's workers: they have the memory of their parent and none of its threads.

Owns the count of forks, by which an object knows that it is another process's, and what is done in a child at once. A child
manages no forward by a manager of its parent; what it would wait for in vain raises.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from memo.errors import SwapError

if TYPE_CHECKING:
    from collections.abc import Callable


class _Lock(Protocol):
    def _at_fork_reinit(self) -> None: ...


_T = TypeVar("_T")
_forks = 0
_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()
_calls: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def count() -> int:
    """Returns the number of forks between this process and the one that imported this module."""
    return _forks


def require_same(forks: int) -> None:
    """Call it before a wait for a thread of the process whose `count()` was `forks`.

    Raises:
        SwapError: this is a fork of that process.
    """
    if forks != _forks:
        raise SwapError(
            "this process was forked from the one whose forward saved these tensors, and has none of its threads; run the "
            "forward again here, or fork between forwards"
        )


def free_in_child(lock: _T) -> _T:
    """Has a lock free in forked children, whichever thread of the parent held it; returns it."""
    _locks.add(lock)  # type: ignore[arg-type]
    return lock


def call_in_child(owner: _T, call: Callable[[_T], None]) -> None:
    """Has `call(owner)` called in forked children while `owner` lives."""
    _calls[owner] = call


def _in_child() -> None:
    global _forks
    _forks += 1
    for lock in list(_locks):
        lock._at_fork_reinit()
    for owner, call in list(_calls.items()):
        call(owner)


os.register_at_fork(after_in_child=_in_child)
