"""Transient device memory of a step: bytes in use besides saved tensors, layer by layer.

Counted in a step recorded on byteless tensors, so that neither the memory nor the device is needed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable

from memo.allocator import Allocation, AllocationTrace
from memo.record import SavedRole, Step, record_step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransientMemory:
    """Peaks of one step, in bytes, not rounded to allocator blocks."""

    forward: dict[str, int]
    """Bytes by layer name, allocated and freed within its forward."""
    backward: dict[str, int]
    """Bytes by layer name, of gradients alive within its backward, except those of parameters."""
    saved_outside: int
    """Bytes saved by embedding and head."""
    outside: int
    """Allocated by embedding and head in forward, and freed within the step."""


def transient_memory_of(build: Callable[[], Step]) -> TransientMemory:
    """Records one step on byteless tensors and sums it up; `build` is called with every tensor byteless."""
    recording = record_step(build, exact=True)
    trace = recording.trace
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    groups: dict[str, list[Allocation]] = collections.defaultdict(list)
    for allocation in trace.allocations:
        if allocation.group:
            groups[allocation.group].append(allocation)
    for group, own in groups.items():
        layer, _, way = group.rpartition(".")
        if way == "forward":
            forward[layer] = _peak(own)
        elif way == "backward":
            begin, end = min(one.lower for one in own), max(one.upper for one in own)
            backward[layer] = _peak(
                one
                for one in trace.allocations
                if one.phase == "backward" and one.upper < trace.end and one.lower < end and one.upper > begin
            )
    inside = tuple(f"{layer}." for layer in forward)
    turning = (one for one in trace.allocations if not one.group and one.phase == "forward" and one.upper < trace.end)
    return TransientMemory(
        forward=forward,
        backward=backward,
        saved_outside=recording.saved_nbytes.get(SavedRole.OUTSIDE, 0),
        outside=_peak(one for one in turning if not f"{one.tag.split(' ')[0]}.".startswith(inside)),
    )


def _peak(allocations: Iterable[Allocation]) -> int:
    return AllocationTrace(allocations=tuple(allocations)).peak_nbytes
