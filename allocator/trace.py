"""The nouns of the allocator: what one training step allocated, from when to when.

All frozen, all pure data, readable without torch. The instants are event indices: each allocation and each free of the step
is one event, counted from 0, so only their order means anything. Lives are half-open: what is freed at an instant may make
room for what is allocated at the same one. A trace is an address problem with notes, and its files are those of
docs/plan-format.md: `memo pack` reads them as they are.

    recorder ──▶ AllocationTrace ──▶ offsets (memo.mip), what PyTorch would reserve (caching), replay (the arena)
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterator

from memo.errors import PlanError
from memo.mip.address import PROBLEM_FORMAT, VERSION, Buffer, Notes, Problem, read_annotated

__all__ = ["Allocation", "AllocationTrace", "read_trace", "trace_of", "trace_to_csv", "trace_to_json"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block of device memory, named as the columns of the file are."""

    id: str
    lower: int
    """The event that allocated it."""
    upper: int
    """The event that freed it, or the trace's end."""
    size: int
    """Bytes, as the recorder was told to round them."""
    tag: str = ""
    """What made it, for people: a module and an operator."""
    phase: str = ""
    """Which part of the step made it, such as `forward`."""
    group: str = ""
    """The layer's pass it does not outlive, such as `layers.3.forward`; empty when it does."""
    stream: int = 0
    """The CUDA stream that asked for it, by order of first use; 0 is the compute stream."""

    def __post_init__(self) -> None:
        if self.stream < 0:
            raise PlanError(f"allocation {self.id!r}: stream {self.stream} is negative")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTrace:
    """The allocations of one step, in the order in which they were made."""

    allocations: tuple[Allocation, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.allocations, key=lambda allocation: allocation.lower))
        object.__setattr__(self, "allocations", ordered)
        _ = self.problem()  # refuses what cannot be placed: empty lives, negative sizes, an id used twice

    @property
    def end(self) -> int:
        """The first instant after the step. What lives until then was not freed within it."""
        return max((allocation.upper for allocation in self.allocations), default=0)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that live at one instant: no allocator can do with less."""
        live = peak = 0
        for allocation, is_free in self.events():
            live += -allocation.size if is_free else allocation.size
            peak = max(peak, live)
        return peak

    def events(self) -> Iterator[tuple[Allocation, bool]]:
        """What happened, in order: an allocation and whether it is freed (True) or made (False).

        Frees come before allocations of the same instant. What is never freed has no second event.
        """
        end = self.end
        made = [(allocation.lower, 1, place) for place, allocation in enumerate(self.allocations)]
        freed = [(a.upper, 0, place) for place, a in enumerate(self.allocations) if a.upper < end]
        for _, kind, place in sorted(made + freed):
            yield self.allocations[place], kind == 0

    def problem(self, *, alignment: int = 1) -> Problem:
        """The address problem: the same lives, without the notes. `problem.buffers[i]` is `allocations[i]`."""
        return Problem(buffers=tuple(_buffer_of(allocation) for allocation in self.allocations), alignment=alignment)


def trace_of(problem: Problem, notes: tuple[Notes, ...] = ()) -> AllocationTrace:
    """The trace that an address problem is, with the notes of its file if there are any.

    Raises:
        PlanError: a note that means nothing.
    """
    pairs = zip(problem.buffers, notes or ({},) * len(problem.buffers), strict=True)
    return AllocationTrace(allocations=tuple(_allocation_of(buffer, note) for buffer, note in pairs))


def read_trace(path: str | os.PathLike[str]) -> AllocationTrace:
    """The trace in a CSV or JSON file; `-` is standard input.

    Raises:
        PlanError: the file cannot be read or is not in the format; the message names the line or the key.
    """
    return trace_of(*read_annotated(path))


_COLUMNS = ("id", "lower", "upper", "size", "tag", "phase")
_OPTIONAL = {"group": "", "stream": 0}


def trace_to_csv(trace: AllocationTrace) -> str:
    """The trace as CSV; the columns `group` and `stream` only where they say something."""
    used = [name for name, default in _OPTIONAL.items() if any(getattr(a, name) != default for a in trace.allocations)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, *used))
    for allocation in trace.allocations:
        writer.writerow([getattr(allocation, name) for name in (*_COLUMNS, *used)])
    return text.getvalue()


def trace_to_json(trace: AllocationTrace) -> str:
    """The trace as JSON, one allocation a line."""
    lines = ",\n".join(json.dumps(_to_json(allocation)) for allocation in trace.allocations)
    head = f'"format": {json.dumps(PROBLEM_FORMAT)},\n"version": {VERSION},\n"alignment": 1'
    return f'{{\n{head},\n"buffers": [\n{lines}\n]\n}}\n'


def _to_json(allocation: Allocation) -> dict[str, object]:
    entry: dict[str, object] = {
        "id": allocation.id,
        "start": allocation.lower,
        "end": allocation.upper,
        "nbytes": allocation.size,
    }
    notes = {name: getattr(allocation, name) for name in ("tag", "phase", "group", "stream")}
    return entry | {name: value for name, value in notes.items() if value}


def _buffer_of(allocation: Allocation) -> Buffer:
    return Buffer(
        id=allocation.id,
        start=allocation.lower,
        end=allocation.upper,
        nbytes=allocation.size,
        group=allocation.group,
    )


def _allocation_of(buffer: Buffer, notes: Notes) -> Allocation:
    stream = notes.get("stream") or "0"
    if not (stream.isascii() and stream.isdigit() and len(stream) < 20):
        raise PlanError(f"allocation {buffer.id!r}: stream is {stream[:40]!r}, not a whole number")
    return Allocation(
        id=buffer.id,
        lower=buffer.start,
        upper=buffer.end,
        size=buffer.nbytes,
        tag=notes.get("tag", ""),
        phase=notes.get("phase", ""),
        group=buffer.group,
        stream=int(stream),
    )
