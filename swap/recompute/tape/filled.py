"""Uninitialised memory of one layer call, and the bytes of it that operators have written.

`empty_like` and its kin compute nothing. Their memory is written by operators, which the log shows, or by kernels
below the dispatcher (Triton, NumPy, an extension), which it does not show. So it counts as unfilled until operators
have overwritten it, in one piece or in several: rotary code writes halves.

    out = empty_like(x)      out[..., :d] = a      out[..., d:] = b        period   one head: d + d elements
    |    |    |    |    |    |a   |a   |a   |a     |a b|a b|a b|a b|       runs     0..d, d..2d of each period
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


_MOST_RUNS = 1024
"""Most runs of bytes in a region or a comparison; what takes more counts as not written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes of a storage: those from `start` to `start + width` for each start, in every period of so many bytes."""

    period: int
    starts: tuple[int, ...]
    width: int

    def runs(self, nbytes: int) -> list[tuple[int, int]]:
        """First byte and end of each run within `nbytes`, a multiple of the period."""
        return [
            (begin + start, begin + start + self.width)
            for begin in range(0, nbytes, self.period)
            for start in self.starts
        ]


@functools.lru_cache(_MOST_RUNS)
def region_of(nbytes: int, offset: int, size: Sequence[int], stride: Sequence[int], itemsize: int) -> Region | None:
    """The bytes of a tensor's elements, offset and strides being in bytes; None for none, and for too many pieces."""
    if 0 in size or nbytes == 0:
        return None
    dims = sorted((far, count) for far, count in zip(stride, size, strict=True) if count > 1 and far > 0)
    width, period = itemsize, nbytes
    while dims and dims[0][0] == width:  # elements that touch
        width *= dims.pop(0)[1]
    while dims and dims[-1][0] * dims[-1][1] == period:  # runs over the storage in equal steps
        within = offset + sum((count - 1) * far for far, count in dims[:-1]) + width
        if within > dims[-1][0]:
            break
        period = dims.pop()[0]
    if math.prod(count for _, count in dims) > _MOST_RUNS:
        return None
    steps = (range(0, far * count, far) for far, count in dims)
    starts = tuple(offset + sum(at) for at in itertools.product(*steps))
    return Region(period=period, starts=starts, width=width)


def covers(written: Sequence[Region], wanted: Region) -> bool:
    """True if every byte of `wanted` is in one of the regions; False as well where that would take too long to find out."""
    is_dense = wanted.width == wanted.period  # and so in periods of any length
    every = written if is_dense else [*written, wanted]
    nbytes = math.lcm(*(region.period for region in every))
    if sum(nbytes // region.period * len(region.starts) for region in every) > _MOST_RUNS:
        return False
    have = sorted(run for region in written for run in region.runs(nbytes))
    for begin, end in [(0, nbytes)] if is_dense else wanted.runs(nbytes):
        for first, stop in have:
            if first <= begin < stop:
                begin = stop
        if begin < end:
            return False
    return True
