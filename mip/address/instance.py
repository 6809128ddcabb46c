"""One arena's problem in solver form: sizes in units of their greatest common divisor, time divided into sections.

A section is an instant at which the set of live buffers is maximal: the set at any other instant is a subset of a
neighbouring section's, so two buffers overlap in time exactly when some section holds both. Buffers of zero bytes are
left out. Units keep the numbers small, which MIP solvers need (in bytes both HiGHS and CBC call feasible models
infeasible), and keep the search's arithmetic exact.
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
    """Buffers by index. Sizes and offsets are in units, times in sections."""

    unit: int
    """Bytes of one unit."""
    sizes: tuple[int, ...]
    alignments: tuple[int, ...]
    fixed: tuple[int, ...]
    """Given offset of each buffer, or -1."""
    spans: tuple[tuple[tuple[int, int], ...], ...]
    """Half-open ranges of sections in which each buffer is in use, in order."""
    n_sections: int

    @property
    def n(self) -> int:
        """Number of buffers."""
        return len(self.sizes)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Sum of the live buffers' sizes in each section."""
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
        """Lower bound on the arena's size: the largest load, or the end of the highest fixed buffer."""
        ends = [at + size for at, size in zip(self.fixed, self.sizes, strict=True) if at >= 0]
        return max([*self.loads, *ends], default=0)

    def height(self, offsets: Sequence[int]) -> int:
        """Size of the arena that these offsets need."""
        return max((offset + size for offset, size in zip(offsets, self.sizes, strict=True)), default=0)


def make_instance(buffers: Sequence[Buffer], *, alignment: int) -> Instance:
    """Builds the instance of one arena's buffers, in their order; none of them may have zero bytes.

    Sizes are rounded up to the alignment: offsets are multiples of it, so no other buffer could use the bytes between.
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
    """Each buffer's section ranges, and the number of sections. An end that follows a start closes a section."""
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
