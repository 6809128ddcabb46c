"""Ctrl-C and SIGTERM as a request: the first is noted, so that the run can end in good order; the second acts at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest"]


class StopRequest:
    """Whether somebody asked the run to end. Handlers are in place only inside `listening`.

    `forwarded`: a launcher stands between, and makes a SIGTERM of the Ctrl-C that the terminal sent here as well; only the
    same signal again is a second request.
    """

    def __init__(self, *, forwarded: bool = False) -> None:
        self._forwarded = forwarded
        self._asked: int | None = None

    def __bool__(self) -> bool:
        return self._asked is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGINT and SIGTERM over from whoever had them, and gives them back."""
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
        print("memo train: stopping after this step; once more stops at once", file=sys.stderr, flush=True)
