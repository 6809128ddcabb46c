"""The nouns of a running step: what the arena saw, where it left its plan, and what it counts. All frozen, all pure data."""

from __future__ import annotations

import dataclasses
import enum

from memo.units import format_bytes

__all__ = ["Divergence", "Event", "EventKind", "MemoryCounters", "Reason", "StepSummary"]


class EventKind(enum.IntEnum):
    """What was asked of the allocator; the numbers are those of step_log.h."""

    MALLOC = 0
    FREE = 1
    USED_ELSEWHERE = 2
    """By a stream other than the one that the block belongs to."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One call of torch's within a step."""

    kind: EventKind
    request: int
    """Which of the step's mallocs it is about, from 0."""
    nbytes: int
    stream: int
    """Its handle; the other one for USED_ELSEWHERE."""
    thread: int


class Reason(enum.IntEnum):
    """How a step left its plan; the numbers are those of figures.h."""

    OTHER_SIZE = 1
    OTHER_STREAM = 2
    EXTRA = 3
    """The plan was at its end."""
    MISSING = 4
    """Planned requests did not come."""
    TAKEN = 5
    """A block that the plan has freed by now was still held."""
    USED_ELSEWHERE = 6
    """A second stream used the block."""
    UNKNOWN_FREE = 7
    """A block was freed twice, or never allocated."""


_WORDS = {
    Reason.OTHER_SIZE: "another size",
    Reason.OTHER_STREAM: "another stream",
    Reason.EXTRA: "a request after the plan's last one",
    Reason.MISSING: "planned requests did not come",
    Reason.TAKEN: "the planned place was still held",
    Reason.USED_ELSEWHERE: "a second stream used the block",
    Reason.UNKNOWN_FREE: "a block was freed twice",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where a step first left its plan."""

    reason: Reason
    request: int
    """The step's, from 0."""
    slot: int
    """The plan's: what was expected."""
    expected_nbytes: int
    expected_stream: int
    got_nbytes: int
    """0 when nothing came."""
    got_stream: int

    def __str__(self) -> str:
        expected, got = _side(self.expected_nbytes, self.expected_stream), _side(self.got_nbytes, self.got_stream)
        return f"request {self.request}: {_WORDS[self.reason]}; planned was {expected}, asked for was {got}"


def _side(nbytes: int, stream: int) -> str:
    return f"{format_bytes(nbytes)} on stream {stream:#x}" if nbytes else "nothing"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What became of a step's requests."""

    requests: int
    planned: int
    """Served at their planned place."""
    outside: int
    """By plan served from the pool, because they outlive the step or other streams use them."""
    fallbacks: int
    """Against the plan served from the pool."""
    fallback_nbytes: int
    divergences: int
    first: Divergence | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounters:
    """The allocator's counters, in the order of `Stats` in arena.cpp; bytes, then numbers of calls."""

    allocated: int
    allocated_peak: int
    reserved: int
    """Taken from the device: the arena, and the pool with what it keeps in reserve."""
    reserved_peak: int
    arena: int
    arena_used: int
    arena_used_peak: int
    requests: int
    frees: int
    planned: int
    outside: int
    fallbacks: int
    fallback_nbytes: int
    divergences: int
    divergent_steps: int
    unknown_frees: int
    rescues: int
    """Requests that found room in the arena when the device had no more."""
    out_of_memory: int
    arena_mallocs: int
    """cudaMalloc calls for the arena."""
    device_mallocs: int
    """All cudaMalloc calls."""
    pool_mallocs: int
    """Requests that went to the pool."""
