"""From one step's events to the plan by which the next ones are served: pure data, no device, no torch.

    events ──recording_of──▶ Recording ──problem_of──▶ Problem ──(memo.mip)──▶ Plan ──layout_of──▶ ReplayLayout
                                 ▲ merge: the longest life of each request over several steps

Time is counted in mallocs, because only a malloc can meet a block that is still alive: a block lives from its own number
to the number of mallocs made before its free. Rule 1: bytes are shared only within one stream, whose order then keeps the
second block's work behind the first one's; each stream has a region of the arena. Rule 2: a block that another stream uses,
or that outlives the step, is in no region; the pool serves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from memo.allocator.step import Event, EventKind
from memo.allocator.trace import Allocation, AllocationTrace
from memo.mip.address import Buffer, Plan, Problem

__all__ = [
    "Recording",
    "ReplayLayout",
    "Request",
    "layout_of",
    "merge",
    "problem_of",
    "recording_of",
    "trace_of_events",
]

ALIGNMENT = 512  # bytes, as step_plan.h has it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One malloc of a step."""

    nbytes: int
    stream: int
    """Its handle."""
    end: int | None
    """How many mallocs of the step came before its free; None: it outlives the step."""
    shared: bool
    """Another stream used it."""

    @property
    def in_arena(self) -> bool:
        """False: the pool serves it (rule 2)."""
        return self.end is not None and not self.shared


Recording = tuple[Request, ...]
"""A step's mallocs, in order."""


def recording_of(events: Iterable[Event]) -> Recording:
    """What a step's events say of each of its mallocs."""
    made: list[Event] = []
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
        Request(nbytes=event.nbytes, stream=event.stream, end=ends.get(number), shared=number in shared)
        for number, event in enumerate(made)
    )


def merge(earlier: Recording, later: Recording) -> Recording | None:
    """Both steps in one: each request lives as long as in the step where it lived longer. None if the requests differ.

    Frees that wait for a copy come when they come; after a few steps the plan has seen how late.
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


def problem_of(recording: Recording) -> Problem:
    """The address problem of what goes into the arena; a buffer's id is its request's number."""
    return Problem(
        buffers=tuple(
            Buffer(id=str(number), start=number, end=request.end, nbytes=request.nbytes, arena=_region(request.stream))
            for number, request in enumerate(recording)
            if request.in_arena and request.end is not None
        ),
        alignment=ALIGNMENT,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLayout:
    """Where each request of a step goes."""

    recording: Recording
    offsets: tuple[int | None, ...]
    """None: outside the arena."""
    nbytes: int
    """How large the arena has to be."""
    lower_bound_nbytes: int
    """No arena with a region for each stream is smaller."""


def layout_of(recording: Recording, plan: Plan) -> ReplayLayout:
    """The recording with the plan's offsets; the regions of the streams lie one behind the other."""
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


def trace_of_events(events: Iterable[Event]) -> AllocationTrace:
    """The step as a trace, every malloc and free an instant: what `memo pack` reads."""
    made: dict[int, tuple[int, Event]] = {}
    freed: dict[int, int] = {}
    streams: dict[int, int] = {}
    clock = 0
    for event in events:
        if event.kind is EventKind.USED_ELSEWHERE:
            continue
        if event.kind is EventKind.MALLOC:
            made[event.request] = clock, event
            streams.setdefault(event.stream, len(streams))
        else:
            freed[event.request] = clock
        clock += 1
    return AllocationTrace(
        allocations=tuple(
            Allocation(
                id=str(request),
                lower=lower,
                upper=freed.get(request, clock),
                size=event.nbytes,
                stream=streams[event.stream],
            )
            for request, (lower, event) in made.items()
        )
    )


def _region(stream: int) -> str:
    return f"stream {stream:#x}"
