"""Writer of a trace during a run: a bounded queue of events and an append-only file.

Events are kept in memory until `flush`, which the training loop calls once a step. Between two flushes at most
`capacity` events are kept; further ones are dropped and counted in the end line, so that memory does not grow.
"""

from __future__ import annotations

import collections
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memo.errors import TraceError
from memo.events import FORMAT, VERSION, Event, StateChange, StepMark, StorageUse, to_json
from memo.forks import call_in_child

if TYPE_CHECKING:
    from pathlib import Path

_CHANGES = (StateChange, StorageUse)


def trace_path(where: Path, *, rank: int) -> Path:
    """The trace file of a rank.

    Args:
        where: a directory, for `trace.rank{rank}.jsonl` in it; or a file name, for rank 0. Another rank replaces `rank0` in
            the name by its own, or adds it: `step.jsonl` becomes `step.rank1.jsonl`.
        rank: the writer's rank.
    """
    if where.is_dir():
        return where / f"trace.rank{rank}.jsonl"
    if "rank0" in where.name:
        return where.with_name(where.name.replace("rank0", f"rank{rank}"))
    return where if rank == 0 else where.with_name(f"{where.stem}.rank{rank}{where.suffix}")


class TraceRecorder:
    """Writer of one rank's trace file; implements `memo.events.Tracer`.

    Args:
        path: the file, which is replaced.
        rank: the writer's rank.
        world_size: number of ranks of the run.
        meta: free-form object of the header.
        capacity: number of events kept between two flushes.
        stacks: the Python lines that saved a storage are wanted.
        now_ns: the clock of the run's events.

    Attributes:
        on_change: Called after each state transition and use, in any thread; must not block.

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
        stacks: bool = False,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.step = 0
        self.stacks = stacks
        self.on_change: Callable[[], None] | None = None
        self.dropped = 0
        self.written = 0
        self._now_ns = now_ns
        self._origin_ns = now_ns()
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
        call_in_child(self, TraceRecorder._write_nowhere)

    @classmethod
    def beside(
        cls,
        where: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        meta: dict[str, Any],
        stacks: bool = False,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> TraceRecorder:
        """Creates the recorder of one rank, with a file of its own.

        Args:
            where: as of `trace_path`.
            rank: the writer's rank.
            world_size: number of ranks of the run.
            meta: free-form object of the header.
            stacks: the Python lines that saved a storage are wanted.
            now_ns: the clock of the run's events.

        Raises:
            TraceError: the file cannot be written, or exists and is not a trace. An existing trace is replaced.
        """
        path = trace_path(where, rank=rank)
        _require_trace(path)
        return cls(path, rank=rank, world_size=world_size, meta=meta, stacks=stacks, now_ns=now_ns)

    def now(self) -> int:
        """Nanoseconds since the trace's origin."""
        return self._now_ns() - self._origin_ns

    def at(self, monotonic_ns: int) -> int:
        """Converts a reading of `time.monotonic_ns()` to nanoseconds since the trace's origin."""
        return max(0, monotonic_ns - self._origin_ns)

    def emit(self, event: Event) -> None:
        """Queues an event, or counts it as dropped when the queue is full."""
        if len(self._events) >= self._capacity:
            self.dropped += 1
        else:
            self._events.append(event)
        if self.on_change is not None and type(event) in _CHANGES:
            self.on_change()

    def begin_step(self, step: int) -> None:
        """Marks the beginning of a step; later events belong to it."""
        self.step = step
        self.emit(StepMark(t=self.now(), step=step, phase="begin"))

    def end_step(self) -> None:
        """Marks the end of the step, and flushes."""
        self.emit(StepMark(t=self.now(), step=self.step, phase="end"))
        self.flush()

    def flush(self) -> None:
        """Writes the queued events, one line each."""
        for _ in range(len(self._events)):
            self._write_line(to_json(self._events.popleft()))
            self.written += 1
        self._file.flush()

    def close(self) -> None:
        """Writes the queued events and the end line. Idempotent."""
        self.on_change = None
        if self._file.closed:
            return
        self.flush()
        self._write_line({"k": "end", "t": self.now(), "events": self.written, "dropped": self.dropped})
        self._file.close()

    def _write_nowhere(self) -> None:
        """In a forked child: the file is its parent's."""
        self._events.clear()
        self._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # closed by close()

    def _write_line(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=True) + "\n")


def _require_trace(path: Path) -> None:
    """Raises TraceError where `path` is a file that is not a trace, so that a mistyped `--trace` destroys nothing."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            start = file.read(100)
    except OSError:
        return  # nor can it be written, which says why
    if start and FORMAT.encode() not in start:
        raise TraceError(f"{str(path)!r} exists and is not a trace; name another file")
