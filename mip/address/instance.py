"""One arena's problem as the solvers see it: whole units of the greatest common divisor, time cut into sections.

A section is a moment at which a set of live buffers is largest: every other moment's set is part of a neighbour's, so
two buffers overlap in time exactly when some section holds both. Buffers of zero bytes are left out. In units the
numbers stay small, which MIP solvers need (in bytes both HiGHS and CBC call feasible models infeasible) and which keeps
the search's arithmetic exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property

from memo.mip.address.problem import Buffer

__all__ = ["Instance", "make_instance"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
    """Buffers by index, sizes in units; `spans[i]` are buffer i's half-open ranges of sections, in order."""

    unit: int
    """Bytes in a unit."""
    sizes: tuple[int, ...]
    alignments: tuple[int, ...]
    fixed: tuple[int, ...]
    """The offset a buffer is fixed at, or -1."""
    spans: tuple[tuple[tuple[int, int], ...], ...]
    n_sections: int

    @property
    def n(self) -> int:
        """Number of buffers."""
        return len(self.sizes)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Units live in each section."""
        steps = [0] * (self.n_sections + 1)
        for size, spans in zip(self.sizes, self.spans, strict=True):
            for first, last in spans:
                steps[first] += size
                steps[last] -= size
        loads, load = [], 0
        for step in steps[:-1]:
            load += step
            loads.append(load)
        return tuple(loads)

    @cached_property
    def lower_bound(self) -> int:
        """No arena of fewer units holds the buffers: the largest load, or the end of the highest fixed buffer."""
        ends = [at + size for at, size in zip(self.fixed, self.sizes, strict=True) if at >= 0]
        return max([*self.loads, *ends], default=0)

    def height(self, offsets: Sequence[int]) -> int:
        """Units of arena that these offsets need."""
        return max((offset + size for offset, size in zip(offsets, self.sizes, strict=True)), default=0)


def make_instance(buffers: Sequence[Buffer], *, alignment: int) -> Instance:
    """The instance of these buffers, all of one arena and none of zero bytes, in their order.

    Sizes are rounded up to the alignment: offsets are multiples of it, so the bytes between could serve nobody.
    """
    sizes = [-(-buffer.nbytes // alignment) * alignment for buffer in buffers]
    alignments = [math.lcm(alignment, buffer.alignment) for buffer in buffers]
    fixed = [-1 if buffer.fixed_offset is None else buffer.fixed_offset for buffer in buffers]
    unit = math.gcd(*sizes, *(a for a in alignments if a > 1), *(at for at in fixed if at >= 0)) or 1
    spans, n_sections = _sections(buffers)
    return Instance(
        unit=unit,
        sizes=tuple(size // unit for size in sizes),
        alignments=tuple(-(-a // unit) if a > 1 else 1 for a in alignments),
        fixed=tuple(at // unit if at >= 0 else -1 for at in fixed),
        spans=spans,
        n_sections=n_sections,
    )


def _sections(buffers: Sequence[Buffer]) -> tuple[tuple[tuple[tuple[int, int], ...], ...], int]:
    """Each buffer's section ranges, and the number of sections. A section closes when an end follows a start."""
    events = []
    for index, buffer in enumerate(buffers):
        for start, end in buffer.spans():
            events += [(start, 1, index), (end, 0, index)]
    opened = [0] * len(buffers)
    spans: list[list[tuple[int, int]]] = [[] for _ in buffers]
    section, grown = 0, False
    for _, begins, index in sorted(events):
        if begins:
            opened[index], grown = section, True
            continue
        if grown:
            section, grown = section + 1, False
        spans[index].append((opened[index], section))
    return tuple(map(tuple, spans)), section
