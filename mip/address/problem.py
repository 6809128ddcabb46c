"""Data types of address planning: buffers with lifetimes and sizes, the problem, and the plan that places them.

All are frozen and pure data. Lifetimes are half-open: a buffer that ends at t and one that starts at t may share bytes.
Whether offsets are valid is decided by `memo.mip.address.checker` alone, not here.

    Problem(buffers, alignment, capacities) ── solve ──▶ Plan(problem, offsets, arenas)
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping

from memo.errors import PlanError

DEVICE = "device"
"""The arena of a buffer that names none."""

MAX_NBYTES = 1 << 62
"""Sizes, offsets and times stay below this, and so does the sum of all sizes: 64-bit arithmetic never overflows."""


class Status(enum.StrEnum):
    """Quality of an arena's size."""

    OPTIMAL = "optimal"
    """No smaller arena exists: it meets the lower bound, or the search below it was exhausted."""
    FEASIBLE = "feasible"
    """It fits; a smaller one may exist."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A block of bytes that keeps one address over its lifetime."""

    id: str
    start: int
    """First instant of the lifetime."""
    end: int
    """First instant after the lifetime."""
    nbytes: int
    alignment: int = 1
    """The offset is a multiple of this and of the problem's alignment."""
    arena: str = DEVICE
    group: str = ""
    """Layer pass within which the buffer lives and dies, such as `layers.3.forward`; empty if there is none."""
    tag: str = ""
    """Code that made it: a recorder's note, which the planner ignores, as the next two."""
    phase: str = ""
    """Part of the step, such as `forward`."""
    stream: int = 0
    """CUDA stream, numbered by first use; 0 is the compute stream."""

    def __post_init__(self) -> None:
        for name in ("start", "end", "nbytes", "alignment", "stream"):
            if abs(getattr(self, name)) > MAX_NBYTES:
                raise PlanError(f"buffer {self.id!r}: {name} is beyond 2^62")
        if self.start >= self.end:
            raise PlanError(f"buffer {self.id!r}: life [{self.start}, {self.end}) is empty")
        if self.stream < 0:
            raise PlanError(f"buffer {self.id!r}: stream {self.stream} is negative; streams count from 0")
        if self.nbytes < 0 or self.alignment < 1:
            raise PlanError(f"buffer {self.id!r}: {self.nbytes} bytes aligned to {self.alignment} cannot be placed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddressProblem:
    """Buffers to place, each in the arena that it names."""

    buffers: tuple[Buffer, ...]
    alignment: int = 1
    """Every offset and every arena's size is a multiple of this many bytes."""
    capacities: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Largest size in bytes, by arena; an arena not named here has no limit."""

    def __post_init__(self) -> None:
        if not 1 <= self.alignment <= MAX_NBYTES:
            raise PlanError(f"alignment {self.alignment} is not between 1 and 2^62")
        counts = collections.Counter(buffer.id for buffer in self.buffers)
        if len(counts) != len(self.buffers):
            name, count = counts.most_common(1)[0]
            raise PlanError(f"{count} buffers have the id {name!r}; each needs one of its own")
        if sum(buffer.nbytes + self.alignment + buffer.alignment for buffer in self.buffers) > MAX_NBYTES:
            raise PlanError("the buffers' sizes add up to more than 2^62 bytes")
        for arena, nbytes in self.capacities.items():
            if nbytes < 0:
                raise PlanError(f"the capacity of arena {arena!r} is negative")

    @property
    def arenas(self) -> tuple[str, ...]:
        """Names of the arenas that hold a buffer, sorted."""
        return tuple(sorted({buffer.arena for buffer in self.buffers}))

    def of(self, arena: str) -> tuple[Buffer, ...]:
        """The buffers of one arena, in the problem's order."""
        return tuple(buffer for buffer in self.buffers if buffer.arena == arena)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlan:
    """Size of one arena under a plan, and the bound on it."""

    name: str
    nbytes: int
    """A multiple of the problem's alignment."""
    lower_bound_nbytes: int
    """No placement of these buffers is smaller."""
    status: Status
    method: str
    """The method that found the placement, for display."""

    @property
    def gap(self) -> float:
        """Excess of the size over the lower bound, as a fraction of the bound."""
        return self.nbytes / self.lower_bound_nbytes - 1 if self.lower_bound_nbytes else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddressPlan:
    """A problem and the offset of each of its buffers."""

    problem: AddressProblem
    offsets: tuple[int, ...]
    """`offsets[i]` is the first byte of `problem.buffers[i]` in its arena."""
    arenas: tuple[ArenaPlan, ...]
    """Sorted by name; one for each arena that holds a buffer."""
    seed: int = 0

    @property
    def status(self) -> Status:
        """OPTIMAL if every arena is, else FEASIBLE."""
        optimal = all(arena.status is Status.OPTIMAL for arena in self.arenas)
        return Status.OPTIMAL if optimal else Status.FEASIBLE

    def arena(self, name: str) -> ArenaPlan:
        """The arena of this name.

        Raises:
            KeyError: no buffer is in it.
        """
        for arena in self.arenas:
            if arena.name == name:
                return arena
        raise KeyError(name)
