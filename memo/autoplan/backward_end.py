"""Calls at the end of a backward, which a program may end right behind.

On a GPU a thread of autograd's frees the call, and waits for the interpreter's lock to do so. If the interpreter is gone by
then, the thread is ended within C++, and with it the process, by SIGABRT.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable

from memo.torch_private import execution_engine

_PATIENCE_S = 1.0


class _Call:
    """A call that is known until autograd has freed it."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def __call__(self) -> None:
        self._function()


_queued: weakref.WeakSet[_Call] = weakref.WeakSet()


def at_end_of_backward(function: Callable[[], object]) -> None:
    """Calls `function` when the backward under way in this thread has ended; at once where there is none."""
    call = _Call(function)
    _queued.add(call)
    try:
        execution_engine.queue_callback(call)
    except RuntimeError:  # not in a backward: the graph was freed
        call()


@atexit.register
def _wait() -> None:
    """Leaves the interpreter's lock to threads that have a call to free."""
    until = time.monotonic() + _PATIENCE_S
    while len(_queued) and time.monotonic() < until:
        time.sleep(0.001)
