"""Threads of memo's own, whose start fails with an error of memo's, and one that hears of signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

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


@contextlib.contextmanager
def signals_told(call: Callable[[int, threading.Event], None]) -> Iterator[None]:
    """Calls `call` in a thread for each signal that Python handles, also while the main thread runs no bytecode.

    Of nested blocks the outer ones hear of a signal first. Main thread only.

    Args:
        call: takes the signal's number, and an event that is set once the block has ended.

    Raises:
        SwapError: the system starts no more threads.
    """
    over = threading.Event()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    def hear() -> None:
        while number := theirs.recv(1):
            if former != -1:
                with contextlib.suppress(OSError):
                    os.write(former, number)
            call(number[0], over)

    with theirs, ours:
        former = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=hear, name="memo-signals", daemon=True)
        try:
            start_thread(thread)
            yield
        finally:
            over.set()
            signal.set_wakeup_fd(former)
            ours.close()
            if thread.ident is not None:
                thread.join()
