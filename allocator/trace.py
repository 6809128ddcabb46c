"""Allocation trace of one training step: blocks of device memory with their lifetimes.

Frozen dataclasses, without torch. Instants are event indices: each allocation and each free of the step is one event,
counted from 0; only their order has a meaning. Lifetimes are half-open: memory freed at an instant may be reused at the
same instant. A trace is an address problem with notes; its files are those of docs/plan-format.md, and `memo pack`
reads them.

    Recorder ──▶ AllocationTrace ──▶ offsets (memo.mip), simulated use of PyTorch's allocator (caching_model)
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator

from memo.errors import PlanError
from memo.mip.address import PROBLEM_FORMAT, VERSION, AddressProblem, Buffer, Notes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block of device memory; fields are named as the columns of the file."""

    id: str
    lower: int
    """Event of its allocation."""
    upper: int
    """Event of its free, or the trace's end."""
    size: int
    """Bytes, rounded as the recorder was told."""
    tag: str = ""
    """Module and operator that made it, for display."""
    phase: str = ""
    """Part of the step that made it, such as `forward`."""
    group: str = ""
    """Pass of the layer in which it is made and freed, such as `layers.3.forward`; empty if it outlives the pass."""
    stream: int = 0
    """CUDA stream that requested it, numbered by first use; 0 is the compute stream."""

    def __post_init__(self) -> None:
        if self.stream < 0:
            raise PlanError(f"allocation {self.id!r}: stream {self.stream} is negative; streams count from 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTrace:
    """Allocations of one step, in the order in which they were made."""

    allocations: tuple[Allocation, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.allocations, key=lambda allocation: allocation.lower))
        object.__setattr__(self, "allocations", ordered)
        _ = self.problem()  # raises for empty lifetimes, negative sizes and duplicate ids

    @property
    def end(self) -> int:
        """First instant after the step. Allocations with this `upper` were not freed within it."""
        return max((allocation.upper for allocation in self.allocations), default=0)

    @property
    def peak_nbytes(self) -> int:
        """Peak of live bytes: a lower bound for every allocator."""
        live = peak = 0
        for allocation, is_free in self.events():
            live += -allocation.size if is_free else allocation.size
            peak = max(peak, live)
        return peak

    def events(self) -> Iterator[tuple[Allocation, bool]]:
        """Yields each event in order: an allocation, and True for its free or False for its start.

        Frees precede allocations of the same instant. An allocation that lives until the end has no free.
        """
        end = self.end
        made = [(allocation.lower, 1, place) for place, allocation in enumerate(self.allocations)]
        freed = [(a.upper, 0, place) for place, a in enumerate(self.allocations) if a.upper < end]
        for _, kind, place in sorted(made + freed):
            yield self.allocations[place], kind == 0

    def problem(self, *, alignment: int = 1) -> AddressProblem:
        """Returns the address problem, without the notes; `problem.buffers[i]` is `allocations[i]`."""
        return AddressProblem(
            buffers=tuple(_buffer_of(allocation) for allocation in self.allocations), alignment=alignment
        )


def trace_of(problem: AddressProblem, notes: tuple[Notes, ...] = ()) -> AllocationTrace:
    """Returns an address problem as a trace, with the notes of its file if there are any.

    Raises:
        PlanError: The note `stream` is not a whole number.
    """
    pairs = zip(problem.buffers, notes or ({},) * len(problem.buffers), strict=True)
    return AllocationTrace(allocations=tuple(_allocation_of(buffer, note) for buffer, note in pairs))


_COLUMNS = ("id", "lower", "upper", "size", "tag", "phase")
_OPTIONAL = {"group": "", "stream": 0}


def trace_to_csv(trace: AllocationTrace) -> str:
    """Formats a trace as CSV; the columns `group` and `stream` are written only if an allocation uses them."""
    used = [name for name, default in _OPTIONAL.items() if any(getattr(a, name) != default for a in trace.allocations)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, *used))
    for allocation in trace.allocations:
        writer.writerow([getattr(allocation, name) for name in (*_COLUMNS, *used)])
    return text.getvalue()


def trace_to_json(trace: AllocationTrace) -> str:
    """Formats a trace as JSON, one allocation per line."""
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
