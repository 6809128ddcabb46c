"""One arena's problem in solver form: sizes in units of their greatest common divisor, time divided into sections.

A section is an instant at which the set of live buffers is maximal: the set at any other instant is a subset of a
neighbouring section's, so two buffers overlap in time exactly when some section holds both. Buffers of zero bytes are
left out. Units keep the numbers small, which MIP solvers need (in bytes HiGHS calls feasible models
infeasible), and keep the search's arithmetic exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from memo.mip.address.problem import Buffer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
    """Buffers by index. Sizes and offsets are in units, times in sections."""

    unit: int
    """Bytes of one unit."""
    sizes: tuple[int, ...]
    alignments: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """Half-open range of sections in which each buffer lives."""
    n_sections: int

    @property
    def n(self) -> int:
        """Number of buffers."""
        return len(self.sizes)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Sum of the live buffers' sizes in each section."""
        steps = [0] * (self.n_sections + 1)
        for size, (first, last) in zip(self.sizes, self.spans, strict=True):
            steps[first] += size
            steps[last] -= size
        loads, load = [], 0
        for step in steps[:-1]:
            load += step
            loads.append(load)
        return tuple(loads)

    @cached_property
    def lower_bound(self) -> int:
        """Lower bound on the arena's size: the largest load."""
        return max(self.loads, default=0)

    @cached_property
    def n_meetings(self) -> int:
        """Sum over the buffers of how many others live at some time in their lives."""
        begun = [0] * (self.n_sections + 1)
        ended = [0] * (self.n_sections + 1)
        for first, last in self.spans:
            begun[first + 1] += 1
            ended[last] += 1
        begun, ended = list(accumulate(begun)), list(accumulate(ended))
        return sum(begun[last] - ended[first] - 1 for first, last in self.spans)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Largest load among each buffer's sections."""
        most = RangeMaximum(self.loads)
        return tuple(most.within(*span) for span in self.spans)

    def part(self, indices: Sequence[int]) -> Instance:
        """The instance of some of the buffers, in the same units, with no more sections than they need."""
        spans, n_sections = _sections([self.spans[i] for i in indices])
        sizes, alignments = (tuple(column[i] for i in indices) for column in (self.sizes, self.alignments))
        return Instance(unit=self.unit, sizes=sizes, alignments=alignments, spans=spans, n_sections=n_sections)

    def height(self, offsets: Sequence[int]) -> int:
        """Size of the arena that these offsets need."""
        return max((offset + size for offset, size in zip(offsets, self.sizes, strict=True)), default=0)


class RangeMaximum:
    """Largest value in any range of a sequence: a table of the largest of every 1, 2, 4, 8, ... neighbours."""

    def __init__(self, values: Sequence[int]) -> None:
        self._rows = [list(values)]
        while 2 << len(self._rows) - 1 <= len(values):
            row, width = self._rows[-1], 1 << len(self._rows) - 1
            self._rows.append(list(map(max, row, row[width:])))

    def within(self, first: int, last: int) -> int:
        """The largest value in [first, last), which is not empty."""
        level = (last - first).bit_length() - 1
        row = self._rows[level]
        return max(row[first], row[last - (1 << level)])


def make_instance(buffers: Sequence[Buffer], *, alignment: int) -> Instance:
    """Builds the instance of one arena's buffers, in their order; none of them may have zero bytes.

    Sizes are rounded up to the alignment: offsets are multiples of it, so no other buffer could use the bytes between.
    """
    sizes = [-(-buffer.nbytes // alignment) * alignment for buffer in buffers]
    alignments = [math.lcm(alignment, buffer.alignment) for buffer in buffers]
    unit = math.gcd(*sizes, *(a for a in alignments if a > 1)) or 1
    spans, n_sections = _sections([(buffer.start, buffer.end) for buffer in buffers])
    return Instance(
        unit=unit,
        sizes=tuple(size // unit for size in sizes),
        alignments=tuple(-(-a // unit) if a > 1 else 1 for a in alignments),
        spans=spans,
        n_sections=n_sections,
    )


def _sections(lives: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Range of sections of each lifetime, and the number of sections. An end after a start closes a section."""
    events = []
    for index, (start, end) in enumerate(lives):
        events += [(start, 1, index), (end, 0, index)]
    opened = [0] * len(lives)
    ranges = [(0, 0)] * len(lives)
    section, grown = 0, False
    for _, begins, index in sorted(events):
        if begins:
            opened[index], grown = section, True
            continue
        if grown:
            section, grown = section + 1, False
        ranges[index] = (opened[index], section)
    return tuple(ranges), section
