"""Data of a running step: allocator events, divergences from the plan, summaries and counters. Frozen dataclasses."""

from __future__ import annotations

import dataclasses
import enum

from memo.units import format_bytes


class EventKind(enum.IntEnum):
    """Kind of an allocator call; the numbers are those of step_log.h."""

    MALLOC = 0
    FREE = 1
    USED_ELSEWHERE = 2
    """Use by a stream other than the block's own (`record_stream`)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One call from torch within a step."""

    kind: EventKind
    request: int
    """Number of the malloc among the step's, from 0."""
    nbytes: int
    stream: int
    """Stream handle; for USED_ELSEWHERE that of the other stream."""
    thread: int


class Reason(enum.IntEnum):
    """Cause of a divergence from the plan; the numbers are those of counters.h."""

    OTHER_SIZE = 1
    OTHER_STREAM = 2
    EXTRA = 3
    """Request after the last planned one."""
    MISSING = 4
    """Planned requests were not made."""
    TAKEN = 5
    """The planned address is still in use by a block that should be freed by now."""
    USED_ELSEWHERE = 6
    """A second stream used the block."""
    UNKNOWN_FREE = 7
    """Free of a block that is not allocated."""


_WORDS = {
    Reason.OTHER_SIZE: "another size",
    Reason.OTHER_STREAM: "another stream",
    Reason.EXTRA: "a request after the plan's last one",
    Reason.MISSING: "planned requests were not made",
    Reason.TAKEN: "the planned address was still held",
    Reason.USED_ELSEWHERE: "a second stream used the block",
    Reason.UNKNOWN_FREE: "free of a block that is not allocated",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """First divergence of a step from its plan."""

    reason: Reason
    request: int
    """Number of the step's request, from 0."""
    slot: int
    """Number of the plan's request that was expected, from 0."""
    expected_nbytes: int
    expected_stream: int
    got_nbytes: int
    """0 when there was no request."""
    got_stream: int

    def __str__(self) -> str:
        expected, got = _side(self.expected_nbytes, self.expected_stream), _side(self.got_nbytes, self.got_stream)
        return f"request {self.request}: {_WORDS[self.reason]}; planned {expected}, requested {got}"


def _side(nbytes: int, stream: int) -> str:
    return f"{format_bytes(nbytes)} on stream {stream:#x}" if nbytes else "nothing"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Number of a step's requests by how they were served."""

    requests: int
    planned: int
    """Served at their planned address."""
    outside: int
    """Served by the pool by plan: they outlive the step, or other streams use them."""
    fallbacks: int
    """Served by the pool against the plan."""
    fallback_nbytes: int
    divergences: int
    first: Divergence | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounters:
    """Counters of the allocator, in the order of `Stats` in counters.h: bytes, then numbers of calls."""

    allocated_bytes: int = 0
    peak_allocated_bytes: int = 0
    """The most since the peaks were restarted, which planning does at the layer boundaries of the steps it measures."""
    reserved_bytes: int = 0
    """Bytes taken from the device: the arena, and the pool with its free memory."""
    peak_reserved_bytes: int = 0
    device_bytes: int = 0
    """Device memory of this process: what is allocated, and under the planned allocator also what is free in the arena."""
    peak_device_bytes: int = 0
    """The most since the process began. No restart of peaks, by planning or by the program, changes it; under torch's
    allocator as far as memo read the counter before torch's own restart."""
    arena_bytes: int = 0
    arena_used_bytes: int = 0
    peak_arena_used_bytes: int = 0
    requests: int = 0
    frees: int = 0
    planned: int = 0
    """Requests served at their planned address."""
    outside: int = 0
    """Requests served by the pool by plan: they outlive their step, or several streams use them."""
    fallbacks: int = 0
    """Requests served by the pool against the plan."""
    fallback_bytes: int = 0
    divergences: int = 0
    divergent_steps: int = 0
    unknown_frees: int = 0
    rescues: int = 0
    """Requests served from free space of the arena when the device was full."""
    out_of_memory: int = 0
    arena_mallocs: int = 0
    """cudaMalloc calls for the arena."""
    device_mallocs: int = 0
    """All cudaMalloc calls."""
    pool_mallocs: int = 0
    """Requests to the pool."""
