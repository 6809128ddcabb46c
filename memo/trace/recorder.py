"""Writes a trace while the run goes on: a bounded queue of events and a file that only grows.

Events are kept in memory until `flush`, which the training loop calls once a step; between two flushes at most
`capacity` events are kept, and what does not fit is counted and reported in the end line instead of growing memory.
"""

from __future__ import annotations

import collections
import json
import os
import time
from typing import TYPE_CHECKING, Any

from memo.errors import TraceError
from memo.events import FORMAT, VERSION, Event, StepMark, to_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TraceRecorder"]


class TraceRecorder:
    """One rank's trace file. Satisfies `memo.events.Tracer`.

    Raises:
        TraceError: the file cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        meta: dict[str, Any] | None = None,
        capacity: int = 500_000,
    ) -> None:
        self.step = 0
        self.dropped = 0
        self.written = 0
        self._origin_ns = time.monotonic_ns()
        self._events: collections.deque[Event] = collections.deque()
        self._capacity = capacity
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed by close()
        except OSError as error:
            raise TraceError(f"cannot write the trace {os.fspath(path)!r}: {error.strerror}") from error
        header = {
            "format": FORMAT,
            "version": VERSION,
            "rank": rank,
            "world_size": world_size,
            "origin_unix_ns": time.time_ns(),
            "meta": meta or {},
        }
        self._write_line(header)
        self._file.flush()

    @classmethod
    def beside(cls, where: Path, *, rank: int = 0, world_size: int = 1, meta: dict[str, Any]) -> TraceRecorder:
        """A recorder at `where`, or at `where/trace.rank{rank}.jsonl` when that is a directory.

        Each of several ranks has a file of its own: `step.jsonl` is `step.rank1.jsonl` for the second, and `rank0` in a name
        is that rank's. The trace of an earlier run is replaced.

        Raises:
            TraceError: the file cannot be written, or it is one of another kind.
        """
        if where.is_dir():
            path = where / f"trace.rank{rank}.jsonl"
        elif "rank0" in where.name:
            path = where.with_name(where.name.replace("rank0", f"rank{rank}"))
        else:
            path = where if rank == 0 else where.with_name(f"{where.stem}.rank{rank}{where.suffix}")
        _require_trace(path)
        return cls(path, rank=rank, world_size=world_size, meta=meta)

    def now(self) -> int:
        """Nanoseconds since the trace's origin."""
        return time.monotonic_ns() - self._origin_ns

    def at(self, monotonic_ns: int) -> int:
        """The same for a reading of `time.monotonic_ns()`."""
        return max(0, monotonic_ns - self._origin_ns)

    def emit(self, event: Event) -> None:
        """Keeps one event, or counts it as dropped when the queue is full."""
        if len(self._events) >= self._capacity:
            self.dropped += 1
        else:
            self._events.append(event)

    def begin_step(self, step: int) -> None:
        """Everything from now on belongs to `step`."""
        self.step = step
        self.emit(StepMark(t=self.now(), step=step, phase="begin"))

    def end_step(self) -> None:
        """The step is over: writes what it did."""
        self.emit(StepMark(t=self.now(), step=self.step, phase="end"))
        self.flush()

    def flush(self) -> None:
        """Writes the events kept so far, a line each."""
        for _ in range(len(self._events)):
            self._write_line(to_json(self._events.popleft()))
            self.written += 1
        self._file.flush()

    def close(self) -> None:
        """Writes what is left and the end line. Idempotent."""
        if self._file.closed:
            return
        self.flush()
        self._write_line({"k": "end", "t": self.now(), "events": self.written, "dropped": self.dropped})
        self._file.close()

    def _write_line(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=True) + "\n")


def _require_trace(path: Path) -> None:
    """Whoever mistypes `--trace` must not lose a file to it."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            start = file.read(100)
    except OSError:
        return  # nor can it be written, which says why
    if start and FORMAT.encode() not in start:
        raise TraceError(f"{str(path)!r} exists and is no trace; name another file")
