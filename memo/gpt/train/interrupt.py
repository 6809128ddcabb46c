"""Interrupts of a run: the first Ctrl-C or SIGTERM requests a stop after the step, the second ends it at once.

Python runs signal handlers between bytecodes, and a step on a CPU may be in one call of torch for minutes. So a thread
answers the signals, and ends the process where the second one's handler has not run in time:

    signal    thread                                     handler, in the main thread
    first     prints that the run stops after the step   makes the request true
    second    waits GRACE_S, prints, exits with 130      raises KeyboardInterrupt, which ends the thread's wait

A rank under a launcher is not ended by the thread here; memo.parallel.ended_by_signal does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from memo.errors import ExitCode
from memo.threads import signals_told

GRACE_S = 3.0
TOGETHER_S = 1.0
"""Signals that come so soon after the first are one request: timeout and wrappers of commands send two, and Python merges
those that arrive in one call."""


class StopRequest:
    """Stop request, true once a signal arrived. Signals are handled only inside `listening`.

    Args:
        lost: what a second request loses, as a clause for the message.
        forwarded: a launcher runs this process and turns a Ctrl-C, which the terminal sends here as well, into a SIGTERM.
            Only the same signal again then counts as the second request.
    """

    def __init__(self, *, lost: str, forwarded: bool = False) -> None:
        self._lost = lost
        self._forwarded = forwarded
        self._asked: int | None = None
        self._told_s: float | None = None

    def __bool__(self) -> bool:
        return self._asked is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM inside the block, then restores the former handlers."""
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with signals_told(self._tell):
                yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked = number
        elif number == self._asked or not self._forwarded:
            raise KeyboardInterrupt(self._lost)

    def _tell(self, number: int, over: threading.Event) -> None:
        """Answers a signal, in the thread; `over` is set once the block has ended."""
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        now_s = time.monotonic()
        if self._told_s is None:
            self._told_s = now_s
            _say("memo train: stopping after this step; interrupt again to stop at once")
        elif now_s - self._told_s >= TOGETHER_S and not self._forwarded and not over.wait(GRACE_S):
            _say(f"memo train: interrupted; {self._lost}")
            os._exit(ExitCode.INTERRUPTED)


def _say(text: str) -> None:
    """Prints where anybody reads: the reader of a pipe may have had the same Ctrl-C."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
