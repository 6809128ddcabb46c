"""Allocation trace of one training step: blocks of device memory with their lifetimes.

Frozen dataclasses, without torch. Instants are event indices: each allocation and each free of the step is one event,
counted from 0; only their order has a meaning. Lifetimes are half-open: memory freed at an instant may be reused at the
same instant. A trace is an address problem with notes; its files are those of docs/plan-format.md, and `memo pack`
reads them.

    Recorder ──▶ AllocationTrace ──▶ offsets (memo.mip), simulated use of PyTorch's allocator (caching_model)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from memo.mip.address import AddressProblem, Buffer, peak


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
        return peak(self.problem().buffers)[1]

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
        """Returns the address problem; `problem.buffers[i]` is `allocations[i]`."""
        return AddressProblem(
            buffers=tuple(_buffer_of(allocation) for allocation in self.allocations), alignment=alignment
        )


_NOTES = ("tag", "phase", "group", "stream")


def trace_of(problem: AddressProblem) -> AllocationTrace:
    """Returns an address problem as a trace."""
    names = {"id": "id", "lower": "start", "upper": "end", "size": "nbytes", **{name: name for name in _NOTES}}
    return AllocationTrace(
        allocations=tuple(
            Allocation(**{own: getattr(buffer, name) for own, name in names.items()}) for buffer in problem.buffers
        )
    )


def _buffer_of(allocation: Allocation) -> Buffer:
    return Buffer(
        id=allocation.id,
        start=allocation.lower,
        end=allocation.upper,
        nbytes=allocation.size,
        **{name: getattr(allocation, name) for name in _NOTES},
    )
