"""Lower bound on an arena's size: the largest sum of live bytes."""

from __future__ import annotations

from collections.abc import Iterable

from memo.mip.address.problem import Buffer


def peak(buffers: Iterable[Buffer], *, alignment: int = 1) -> tuple[int, int]:
    """Finds the largest sum of live bytes, with sizes rounded up to the alignment. No arena can be smaller.

    Returns:
        (first instant of the largest sum, that sum in bytes); (0, 0) without buffers.
    """
    steps: dict[int, int] = {}
    for buffer in buffers:
        size = -(-buffer.nbytes // alignment) * alignment
        steps[buffer.start] = steps.get(buffer.start, 0) + size
        steps[buffer.end] = steps.get(buffer.end, 0) - size
    at = load = most = 0
    for time in sorted(steps):
        load += steps[time]
        if load > most:
            at, most = time, load
    return at, most
