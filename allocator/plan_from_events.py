"""Conversion of a step's allocator events to an address problem, and of its solution to an arena layout; pure data.

    events ──recording_of──▶ Recording ──problem_of──▶ Problem ──(memo.mip)──▶ Plan ──layout_of──▶ ReplayLayout
                                 ▲ merge: longest lifetime of each request over several steps

Time is counted in mallocs, since only a malloc can conflict with a live block: a block lives from its own number to the
number of mallocs before its free. Rule 1: bytes are shared only within one stream, whose order puts the second block's
work after the first one's; each stream has a region of the arena. Rule 2: a block that another stream uses, or that
outlives the step, is served by the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from memo.allocator.step import EventKind, StepEvent
from memo.mip.address import AddressPlan, AddressProblem, Buffer

ALIGNMENT = 512  # bytes, as step_plan.h has it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest:
    """One malloc of a step."""

    nbytes: int
    stream: int
    """Stream handle."""
    end: int | None
    """Number of the step's mallocs before its free; None if it outlives the step."""
    shared: bool
    """True if another stream used it."""

    @property
    def in_arena(self) -> bool:
        """False if the pool serves it (rule 2)."""
        return self.end is not None and not self.shared


Recording = tuple[AllocationRequest, ...]
"""Mallocs of a step, in order."""


def recording_of(events: Iterable[StepEvent]) -> Recording:
    """Returns the mallocs of a step with their lifetimes and uses."""
    made: list[StepEvent] = []
    ends: dict[int, int] = {}
    shared: set[int] = set()
    for event in events:
        if event.kind is EventKind.MALLOC:
            made.append(event)
        elif event.kind is EventKind.FREE:
            ends[event.request] = len(made)
        else:
            shared.add(event.request)
    return tuple(
        AllocationRequest(nbytes=event.nbytes, stream=event.stream, end=ends.get(number), shared=number in shared)
        for number, event in enumerate(made)
    )


def merge(earlier: Recording, later: Recording) -> Recording | None:
    """Returns one recording with the longer lifetime of each request; None if the requests differ.

    Frees that wait for a copy vary in time; after a few steps the merged recording has seen the latest.
    """
    if [(a.nbytes, a.stream) for a in earlier] != [(b.nbytes, b.stream) for b in later]:
        return None
    return tuple(
        dataclasses.replace(
            a,
            end=None if a.end is None or b.end is None else max(a.end, b.end),
            shared=a.shared or b.shared,
        )
        for a, b in zip(earlier, later, strict=True)
    )


def problem_of(recording: Recording) -> AddressProblem:
    """Returns the address problem of the requests in the arena; a buffer's id is the number of its request."""
    return AddressProblem(
        buffers=tuple(
            Buffer(id=str(number), start=number, end=request.end, nbytes=request.nbytes, arena=_region(request.stream))
            for number, request in enumerate(recording)
            if request.in_arena and request.end is not None
        ),
        alignment=ALIGNMENT,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLayout:
    """Arena layout of a step."""

    recording: Recording
    offsets: tuple[int | None, ...]
    """Offset of each request; None if the pool serves it."""
    nbytes: int
    """Size of the arena."""
    lower_bound_nbytes: int
    """Lower bound of the size of an arena with a region for each stream."""


def layout_of(recording: Recording, plan: AddressPlan) -> ReplayLayout:
    """Returns the layout for a plan of `problem_of(recording)`; the streams' regions are concatenated."""
    bases: dict[str, int] = {}
    end = 0
    for arena in plan.arenas:
        bases[arena.name] = end
        end += arena.nbytes
    offsets: list[int | None] = [None] * len(recording)
    for buffer, offset in zip(plan.problem.buffers, plan.offsets, strict=True):
        offsets[int(buffer.id)] = bases[buffer.arena] + offset
    bound = sum(arena.lower_bound_nbytes for arena in plan.arenas)
    return ReplayLayout(recording=recording, offsets=tuple(offsets), nbytes=end, lower_bound_nbytes=bound)


def _region(stream: int) -> str:
    return f"stream {stream:#x}"
