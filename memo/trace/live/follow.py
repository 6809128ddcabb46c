"""Follows the trace of a running job: reads what was added since, and keeps the newest complete steps.

Memory and work of an update are those of the kept steps, however long the run is. A line without its newline waits for
the rest. A file that was replaced by another run's begins anew.
"""

from __future__ import annotations

import collections
import os
from typing import TYPE_CHECKING

from memo.bounded_files import Refused, open_file
from memo.errors import TraceError
from memo.events import Event, Span, StepMark
from memo.trace.decode_event import decode_event, decode_object
from memo.trace.device_clock import on_device_clock
from memo.trace.reader import Trace, TraceLimits, read_header

if TYPE_CHECKING:
    from typing import Any

_BLOCK = 1 << 22  # bytes read at once
_START = 200  # bytes that tell one run's file from another's: a header begins with the time


def _is_issued(event: Event) -> bool:
    return isinstance(event, Span) and event.issued is not None


class Follower:
    """One trace file that grows.

    Args:
        path: the file, which need not exist yet.
        keep: number of newest complete steps to keep.
        limits: of a line and of the events that are kept.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 4, limits: TraceLimits | None = None) -> None:
        self.path = os.fspath(path)
        self.ended = False
        """Whether the writer has closed the trace."""
        self.done = 0
        """Number of steps that were completed, of this file."""
        self._keep = keep
        self._limits = limits or TraceLimits()
        self._begin()

    def _begin(self) -> None:
        self.ended, self.done = False, 0
        self._start = b""
        self._offset = self._line = 0
        self._rest = b""
        self._header: dict[str, Any] | None = None
        self._steps: dict[int, list[Event]] = collections.defaultdict(list)
        self._complete: list[int] = []
        self._dropped = 0
        self._wrong: str | None = None

    def update(self) -> None:
        """Reads what was added.

        Raises:
            TraceError: the file is no trace, or cannot be read; the message names the line. Raised again until another
                file is in its place.
        """
        try:
            with open_file(self.path) as file:
                start = file.read(_START)
                if not start.startswith(self._start) or os.fstat(file.fileno()).st_size < self._offset:
                    self._begin()
                self._start = start
                if self._wrong is not None:
                    raise TraceError(self._wrong)
                file.seek(self._offset)
                while block := file.read(_BLOCK):
                    self._offset += len(block)
                    self._take(block)
        except FileNotFoundError:
            self._begin()
        except Refused as error:
            raise TraceError(f"{self.path}: {error}") from None
        except OSError as error:
            raise TraceError(f"{self.path}: cannot read: {error.strerror}") from None

    def trace(self) -> Trace | None:
        """The newest complete steps; None before there is one."""
        if self._header is None or not self._complete:
            return None
        spans = [event for step in self._steps.values() for event in step]
        issued = {step: sum(map(_is_issued, events)) for step, events in self._steps.items()}
        complete = list(self._complete)
        # On a GPU a step's layers are written as they end there, which may be after the host's end of the step.
        while not self.ended and len(complete) > 1 and issued.get(complete[-1], 0) < issued.get(complete[-2], 0):
            complete.pop()
        events = [event for step in complete for event in self._steps.get(step, ())]
        return Trace(
            path=self.path,
            events=tuple(on_device_clock(events, spans)),
            dropped=self._dropped,
            **self._header,
        )

    def _take(self, block: bytes) -> None:
        *lines, self._rest = (self._rest + block).split(b"\n")
        try:
            for line in lines:
                self._line += 1
                self._check_length(line)
                self._read(line.decode("utf-8"))
            self._line += 1
            self._check_length(self._rest)
            self._line -= 1
        except (UnicodeDecodeError, TraceError) as error:
            reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
            self._wrong = f"{self.path}, line {self._line}: {reason}"
            raise TraceError(self._wrong) from None

    def _check_length(self, line: bytes) -> None:
        limit = self._limits.header_nbytes if self._header is None else self._limits.line_nbytes
        if len(line) > limit:
            raise TraceError(f"longer than {limit} bytes")

    def _read(self, line: str) -> None:
        if self._header is None:
            self._header = read_header(line)
            return
        fields = decode_object(line)
        if fields.get("k") == "end":
            dropped = fields.get("dropped")
            self.ended, self._dropped = True, dropped if type(dropped) is int else 0
            return
        event = decode_event(fields)
        self._steps[event.step].append(event)
        if isinstance(event, StepMark) and event.phase == "end":
            self.done += 1
            self._complete.append(event.step)
        self._forget()

    def _forget(self) -> None:
        """Drops the oldest steps, beyond `keep` complete ones or too many events."""
        while len(self._complete) > self._keep or (
            len(self._complete) > 1 and sum(map(len, self._steps.values())) > self._limits.events
        ):
            oldest = self._complete.pop(0)
            for step in [step for step in self._steps if step <= oldest]:
                del self._steps[step]
        if not self._complete and sum(map(len, self._steps.values())) > self._limits.events:
            raise TraceError(f"a step of more than {self._limits.events:,} events")
