"""The lower bound: the largest sum of live bytes, and when it is reached."""

from __future__ import annotations

from collections.abc import Iterable

from memo.mip.address.problem import Buffer

__all__ = ["peak"]


def peak(buffers: Iterable[Buffer], *, alignment: int = 1) -> tuple[int, int]:
    """(first instant of the largest load, that load in bytes), sizes rounded up to the alignment; (0, 0) for none.

    No arena that holds the buffers is smaller.
    """
    steps: dict[int, int] = {}
    for buffer in buffers:
        size = -(-buffer.nbytes // alignment) * alignment
        for start, end in buffer.spans():
            steps[start] = steps.get(start, 0) + size
            steps[end] = steps.get(end, 0) - size
    at = load = most = 0
    for time in sorted(steps):
        load += steps[time]
        if load > most:
            at, most = time, load
    return at, most
