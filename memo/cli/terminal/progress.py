"""Waiting line: on standard error, what a command is doing, once it has done it for two seconds.

On a terminal one line is rewritten in place and erased at the end. Elsewhere, as in a log file, nothing is written in the
first ten seconds (of memo train thirty), then one line, and another one each minute. Standard output is never touched, and
with `quiet`, as under `--json`, nothing is written where standard error is no terminal.

    with WaitingLine("memo plan", "solving 7b at 1m") as waiting:        memo plan: solving 7b at 1m, 3 s
        plan = solve(problem)
        waiting.say("simulating")                                        memo plan: simulating, 5 s
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

from memo.trace import printable

TERMINAL_AFTER_S, TERMINAL_EVERY_S = 2.0, 1.0
LOG_AFTER_S, LOG_EVERY_S = 10.0, 60.0

_ERASE = "\r\x1b[K"


class WaitingLine:
    """Context in which a thread writes the line; it ends with the block, or earlier by `end`.

    Args:
        command: first words of the line, such as `memo plan`.
        text: what the command is doing, in a few words.
        quiet: write to a terminal only.
        log_after_s: seconds until the first line where standard error is no terminal; None is LOG_AFTER_S.
        stream: where to write; None is standard error.
    """

    def __init__(
        self,
        command: str,
        text: str,
        *,
        quiet: bool = False,
        log_after_s: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._command = command
        self._text = text
        self._log_after_s = log_after_s
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        leads = os.environ.get("RANK", "0") == "0"  # of the ranks that torchrun starts, the first one writes
        self._thread: threading.Thread | None = None
        if leads and (self._terminal or not quiet):
            self._thread = threading.Thread(target=self._write, name="memo-waiting-line", daemon=True)
        self._done = threading.Event()
        self._shown = False

    def say(self, text: str) -> None:
        """Replaces the text from the next writing on; any thread."""
        self._text = text

    def end(self) -> None:
        """Erases the line and writes no other. Idempotent; called before the command prints."""
        if self._thread is None or self._done.is_set():
            return
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._shown:
            self._put(_ERASE)

    def __enter__(self) -> WaitingLine:
        self._begin = time.monotonic()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _write(self) -> None:
        for due_s in due_times(terminal=self._terminal, log_after_s=self._log_after_s):
            if self._done.wait(self._begin + due_s - time.monotonic()):
                return
            line = f"{self._command}: {printable(self._text)}, {time.monotonic() - self._begin:.0f} s"
            if self._terminal:
                self._shown = True
                self._put(f"{_ERASE}{line[: _columns() - 1]}")
            else:
                self._put(f"{line}\n")

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # standard error is full or closed: the work goes on
            self._stream.write(text)
            self._stream.flush()


def due_times(*, terminal: bool, log_after_s: float | None = None) -> Iterator[float]:
    """Seconds after the beginning at which the line is written."""
    if terminal:
        return itertools.count(TERMINAL_AFTER_S, TERMINAL_EVERY_S)
    return itertools.count(LOG_AFTER_S if log_after_s is None else log_after_s, LOG_EVERY_S)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
