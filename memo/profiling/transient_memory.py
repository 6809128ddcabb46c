"""Transient device memory of a step: bytes in use besides saved tensors, layer by layer.

Counted in a step recorded on byteless tensors, so that neither the memory nor the device is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memo.record import LayerPeaks, SavedRole, Step, peak_of, record_step


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
    trace, peaks = recording.trace, LayerPeaks.of(recording.trace)
    inside = tuple(f"{layer}." for layer in peaks.forward)
    turning = (one for one in trace.allocations if not one.group and one.phase == "forward" and one.upper < trace.end)
    return TransientMemory(
        forward=peaks.forward,
        backward=peaks.backward,
        saved_outside=recording.saved_nbytes.get(SavedRole.OUTSIDE, 0),
        outside=peak_of(one for one in turning if not f"{one.tag.split(' ')[0]}.".startswith(inside)),
    )
