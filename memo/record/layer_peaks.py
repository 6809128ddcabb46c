"""Peaks of transient memory in each layer, from the allocations of one recorded step."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from memo.allocator import Allocation, AllocationTrace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPeaks:
    """Peaks in bytes by layer, of the sizes in the trace."""

    forward: dict[str, int]
    """Bytes allocated within the layer's forward."""
    backward: dict[str, int]
    """Bytes of gradients alive within the layer's backward, except those of parameters."""
    spans: dict[str, tuple[int, int]]
    """First and last event of what each pass allocates, by `LAYER.forward` and `LAYER.backward`."""

    @classmethod
    def of(cls, trace: AllocationTrace) -> LayerPeaks:
        """Peaks of a step."""
        groups: dict[str, list[Allocation]] = collections.defaultdict(list)
        for allocation in trace.allocations:
            if allocation.group:
                groups[allocation.group].append(allocation)
        forward: dict[str, int] = {}
        backward: dict[str, int] = {}
        spans = {group: (min(one.lower for one in own), max(one.upper for one in own)) for group, own in groups.items()}
        for group, (begin, end) in spans.items():
            layer, _, way = group.rpartition(".")
            if way == "forward":
                forward[layer] = peak_of(groups[group])
            elif way == "backward":
                backward[layer] = peak_of(
                    one
                    for one in trace.allocations
                    if one.phase == "backward" and one.upper < trace.end and one.lower < end and one.upper > begin
                )
        return cls(forward=forward, backward=backward, spans=spans)


def peak_of(allocations: Iterable[Allocation]) -> int:
    """Most bytes of these at one time."""
    return AllocationTrace(allocations=tuple(allocations)).peak_nbytes
