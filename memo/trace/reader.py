"""Reader of trace files from anywhere: strict, bounded in memory and time, tolerant of one torn last line.

Owns the limits below. Invariant: a Trace holds only events of `memo.events`, sorted by time, and `remarks` names
everything that is not as a finished run leaves it (torn line, no end line, dropped events). Files ending in `.gz` are
read too; their unpacked text is held to the same limits.

    header line, event line * n, end line            a finished run
    header line, event line * n, half a line         a killed run: the half is left out and reported
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import operator
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from memo.bounded_files import Refused, Unpacked, open_file, require_plain, shown_name
from memo.errors import TraceError
from memo.events import FORMAT, VERSION, Event, Span
from memo.trace.decode_event import decode_event, decode_object, natural
from memo.trace.device_clock import on_device_clock

_GZIP_NAME = re.compile(r"\.gz$", re.IGNORECASE)
_BLOCK = 1 << 17  # bytes unpacked at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimits:
    """Limits beyond which a file is refused."""

    header_nbytes: int = 4 << 20
    """Length of the first line, whose `meta` may carry a whole plan."""
    line_nbytes: int = 64 << 10
    """Length of any other line."""
    total_nbytes: int = 1 << 30
    """Length of the whole text, unpacked."""
    events: int = 2_000_000
    """Events kept in memory, about 300 bytes each; a longer run is read some steps at a time."""
    unpack_ratio: int = 60
    """Largest ratio of unpacked to packed bytes of a .gz beyond its first MiB; traces reach 15."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Contents of one rank's trace file."""

    path: str
    rank: int
    world_size: int
    origin_unix_ns: int
    """Wall clock at the trace's time zero, which aligns the ranks."""
    meta: dict[str, Any]
    events: tuple[Event, ...]
    """Sorted by `t`, those of the host on the device's clock (memo.trace.device_clock)."""
    dropped: int
    """Number of events that the writer dropped."""
    remarks: tuple[str, ...] = ()
    """Caveats for every figure made from this trace, one sentence each."""


def read_traces(
    paths: Sequence[str | os.PathLike[str]], *, steps: range | None = None, limits: TraceLimits | None = None
) -> list[Trace]:
    """Reads the traces of one run, one file per rank.

    Args:
        paths: the files, in any order.
        steps: read only the events of these steps; None reads all.
        limits: of each file.

    Returns:
        Traces sorted by rank.

    Raises:
        TraceError: no path, an unreadable file, or two files of one rank.
    """
    if not paths:
        raise TraceError("no trace file given")
    traces = sorted((read_trace(path, steps=steps, limits=limits) for path in paths), key=operator.attrgetter("rank"))
    for one, other in itertools.pairwise(traces):
        if one.rank == other.rank:
            raise TraceError(f"{one.path!r} and {other.path!r} are both of rank {one.rank}; give one run at a time")
    return traces


def read_trace(path: str | os.PathLike[str], *, steps: range | None = None, limits: TraceLimits | None = None) -> Trace:
    """Reads one trace file; of the given steps alone, if any are given.

    Raises:
        TraceError: the file cannot be opened, or is not a trace within the limits; the message names the line.
    """
    shown = shown_name(path)
    limits = limits or TraceLimits()
    reading = _Reading(path=shown, steps=steps, most=limits.events)
    try:
        with _Lines(Path(path), limits) as lines:
            for line, whole in lines:
                reading.take(line, whole=whole)
        return reading.finish()
    except (TraceError, Refused) as error:
        place = f"{shown}, line {reading.line}" if reading.line else shown
        raise TraceError(f"{place}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{shown}: cannot read: {reason}") from None


class _Lines:
    """Lines of a file within the limits, as (text, ended with a newline)."""

    def __init__(self, path: Path, limits: TraceLimits) -> None:
        file = open_file(path, pipes=True)
        self._stream: IO[bytes] | io.BufferedReader = file
        if _GZIP_NAME.search(path.name) is not None:
            self._stream = io.BufferedReader(Unpacked(file, most_ratio=limits.unpack_ratio), _BLOCK)
        self._limits = limits

    def __enter__(self) -> Iterator[tuple[str, bool]]:
        return self._lines()

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def _lines(self) -> Iterator[tuple[str, bool]]:
        limit = self._limits.header_nbytes
        total = 0
        while line := self._stream.readline(limit + 1):
            if len(line) > limit:
                raise TraceError(f"the next line is longer than {limit} bytes")
            total += len(line)
            if total > self._limits.total_nbytes:
                raise TraceError(f"holds more than {self._limits.total_nbytes} bytes")
            whole = line.endswith(b"\n")
            try:
                yield line.decode("utf-8"), whole
            except UnicodeDecodeError:
                if whole:
                    raise TraceError("not UTF-8 text") from None
                yield "", False
            limit = self._limits.line_nbytes


class _Reading:
    """State of reading one file: header, then events, then the end line."""

    def __init__(self, *, path: str, steps: range | None, most: int) -> None:
        self._path = path
        self._steps = steps
        self._most = most
        self._seen = 0
        self._header: dict[str, Any] | None = None
        self._events: list[Event] = []
        self._spans: list[Event] = []
        """Layers of all steps that say when they were issued."""
        self._end: tuple[int, int] | None = None  # (events, dropped) by the writer's count
        self._torn = False
        self.line = 0

    def take(self, line: str, *, whole: bool) -> None:
        self.line += 1
        if self._header is None:
            self._header = read_header(line)
            return
        if self._end is not None:
            raise TraceError("goes on after its end line")
        try:
            fields = decode_object(line)
            if fields.get("k") == "end":
                self._end = (natural(fields.get("events")), natural(fields.get("dropped")))
            else:
                self._keep(decode_event(fields))
        except TraceError:
            if whole:
                raise
            self._torn = True

    def _keep(self, event: Event) -> None:
        self._seen += 1
        if isinstance(event, Span) and event.issued is not None and len(self._spans) < self._most:
            self._spans.append(event)
        if self._steps is not None and event.step not in self._steps:
            return
        if len(self._events) == self._most:
            raise TraceError(f"more than {self._most:,} events; choose some steps, for instance --steps 10-12")
        self._events.append(event)

    def finish(self) -> Trace:
        if self._header is None:
            raise TraceError("is empty")
        dropped = self._end[1] if self._end else 0
        return Trace(
            path=self._path,
            events=tuple(on_device_clock(self._events, self._spans)),
            dropped=dropped,
            remarks=tuple(self._remarks(dropped)),
            **self._header,
        )

    def _remarks(self, dropped: int) -> Iterator[str]:
        if self._torn:
            yield "The last line is torn: the run ended while it was written."
        elif self._end is None:
            yield "There is no end line: the run was killed, or is still going."
        elif self._end[0] != self._seen:
            yield f"The end line counts {self._end[0]:,} events and the file has {self._seen:,}."
        if dropped:
            yield f"{dropped:,} events were dropped because the ring was full; every sum is a lower bound."


def read_header(line: str) -> dict[str, Any]:
    """The header's fields, as keyword arguments of Trace.

    Raises:
        TraceError: the line is no header of a trace that this version reads.
    """
    try:
        fields = decode_object(line)
    except TraceError as error:
        hint = "a trace begins with a header, as `memo train --trace` and `memo simulate -o` write it"
        raise TraceError(f"{error}; {hint}") from None
    if fields.get("format") != FORMAT:
        raise TraceError(f'is not a {FORMAT} file (its first line lacks `"format": "{FORMAT}"`)')
    if fields.get("version") != VERSION or type(fields["version"]) is not int:
        raise TraceError(f"is version {ascii(fields.get('version'))[:40]}; this memo reads version {VERSION}")
    meta = fields.get("meta", {})
    if not isinstance(meta, dict):
        raise TraceError("`meta` is not an object")
    try:
        require_plain(meta)
    except Refused as error:
        raise TraceError(f"`meta`: {error}") from None
    rank, world_size = natural(fields.get("rank")), natural(fields.get("world_size"))
    if rank >= world_size:
        raise TraceError(f"rank {rank} is outside a world of {world_size}")
    return {
        "rank": rank,
        "world_size": world_size,
        "origin_unix_ns": natural(fields.get("origin_unix_ns")),
        "meta": meta,
    }
