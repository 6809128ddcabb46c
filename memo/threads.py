"""Threads of memo's own: daemons, whose start fails with an error of memo's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from memo.errors import SwapError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["start_thread"]


def start_thread(
    target: Callable[..., None], name: str, *args: object, stack_bytes: int | None = None
) -> threading.Thread:
    """Starts a daemon thread that calls `target(*args)`.

    Args:
        target: called in the thread.
        name: the thread's name.
        args: arguments of `target`.
        stack_bytes: size of its stack; None: the process's default.

    Raises:
        SwapError: the system starts no more threads.
    """
    thread = threading.Thread(target=target, name=name, args=args, daemon=True)
    before = threading.stack_size()
    try:
        if stack_bytes is not None:
            threading.stack_size(stack_bytes)
        thread.start()
    except RuntimeError as error:
        raise SwapError(
            f"the thread {name} could not be started ({error}): raise the limit of processes (ulimit -u, or pids.max of "
            "the container), or leave memory for a thread's stack"
        ) from error
    finally:
        threading.stack_size(before)
    return thread
