"""Interrupts of a run: the first Ctrl-C or SIGTERM requests a stop after the step, the second raises at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Stop request, true once a signal arrived. Signal handlers are installed only inside `listening`.

    Args:
        forwarded: a launcher runs this process and turns a Ctrl-C, which the terminal sends here as well, into a SIGTERM.
            Only the same signal again then counts as the second request.
    """

    def __init__(self, *, forwarded: bool = False) -> None:
        self._forwarded = forwarded
        self._asked: int | None = None

    def __bool__(self) -> bool:
        return self._asked is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM inside the block, then restores the former handlers."""
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            if self._forwarded and number != self._asked:
                return
            raise KeyboardInterrupt
        self._asked = number
        print("memo train: stopping after this step; interrupt again to stop at once", file=sys.stderr, flush=True)
