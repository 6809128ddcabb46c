"""Threads of memo's own, whose start fails with an error of memo's."""

from __future__ import annotations

import threading

from memo.errors import SwapError


def start_thread(thread: threading.Thread, *, stack_bytes: int | None = None) -> None:
    """Starts a thread. Its owner has it already: an interruption here leaves none that nobody knows.

    Args:
        thread: not started yet. Its `ident` stays None where it could not be.
        stack_bytes: size of its stack; None: the process's default.

    Raises:
        SwapError: the system starts no more threads.
    """
    before = threading.stack_size()
    try:
        if stack_bytes is not None:
            threading.stack_size(stack_bytes)
        thread.start()
    except RuntimeError as error:
        raise SwapError(
            f"the thread {thread.name} could not be started ({error}): raise the limit of processes (ulimit -u, or pids.max "
            "of the container), or leave memory for a thread's stack"
        ) from error
    finally:
        threading.stack_size(before)
