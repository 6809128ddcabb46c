"""What stands on the device besides what is saved, layer by layer, from a step that is run without memory."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable

from memo.allocator import Allocation, AllocationTrace
from memo.record import Role, Step, record_step

__all__ = ["TransientMemory", "transients_of"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransientMemory:
    """Bytes of one step."""

    forward: dict[str, int]
    """By layer, the most that it makes and gives up within its forward."""
    backward: dict[str, int]
    """The most gradients that are alive within its backward, without those of parameters."""
    saved_outside: int
    """What is saved before and behind the layers."""
    outside: int
    """The most that is made there and given up within the step."""


def transients_of(build: Callable[[], Step]) -> TransientMemory:
    """From a step that is recorded with hollow tensors, in the sizes that were asked for."""
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
        saved_outside=recording.saved_nbytes.get(Role.OUTSIDE, 0),
        outside=_peak(one for one in turning if not f"{one.tag.split(' ')[0]}.".startswith(inside)),
    )


def _peak(allocations: Iterable[Allocation]) -> int:
    return AllocationTrace(allocations=tuple(allocations)).peak_nbytes
