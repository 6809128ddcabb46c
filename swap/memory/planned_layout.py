"""Planned layout of the host arena: a step's claims are recorded, planned by `memo.mip`, and followed in the next step.

First fit leaves holes. A plan avoids them, since a training step claims the same bytes in the same order again. The plan is
advice: a claim that does not match it, or whose planned place is still taken by a late copy, is served by first fit and
counted as a miss, and a step with misses is planned again. So a wrong plan costs room and never correctness.

Where sizes differ from step to step, as of rows that are routed to experts, the plan of another step leaves more holes than
none. So steps are left to first fit where it needed no more than the bytes held, as where what was claimed last is released
first, and where many claims miss.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from memo.errors import Infeasible, SolverTimeout
from memo.lru import LRU
from memo.mip.address import DEVICE, AddressProblem, Buffer, Method, solve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.swap.memory.free_list import FreeList

PLAN_SECONDS = 1.0  # time limit of one plan; a step of 1,000 storages takes a few milliseconds
KEPT_LAYOUTS = 8  # as many sequence lengths may alternate without planning again
PLANS_EACH = 3  # plans of steps with one first size
IRREGULAR = 1 / 16  # share of misses; after two such steps those of that first size are left to first fit
IRREGULAR_STEPS = 2
KEPT_SIZES = 64  # first sizes of which it is remembered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddressLayout:
    """Offsets of one step's claims, in order; None for a claim that the arena refused or that first fit serves."""

    sizes: tuple[int, ...]
    offsets: tuple[int | None, ...]
    nbytes: int
    """Bytes that the arena needs."""
    lower_bound_nbytes: int


@dataclasses.dataclass(slots=True)
class _Life:
    """A claim and its half-open lifetime, in claims and releases since the step's begin."""

    nbytes: int
    start: int
    end: int = 0
    """Time of the release; 0 for a claim that was refused."""
    offset: int | None = None
    """Where it was placed; None for a claim that was refused."""


@dataclasses.dataclass(slots=True)
class _Known:
    """What is known of the steps with one first size."""

    plans: int = 0
    irregular: int = 0
    """Steps with too many misses."""


class StepRecorder:
    """Record of the current step's claims and releases, and layouts of earlier steps by the size of their first claim."""

    def __init__(self) -> None:
        self.step = 0
        """Number of the current step."""
        self.misses = 0
        """Claims of this step that did not get their planned place."""
        self._clock = 0
        self._lives: list[_Life] = []
        self._layouts: collections.OrderedDict[int, AddressLayout] = collections.OrderedDict()
        self._known: LRU[int, _Known] = LRU(KEPT_SIZES)
        self._following: AddressLayout | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the largest layout needs."""
        return max((layout.nbytes for layout in self._layouts.values()), default=0)

    def claim(self, nbytes: int) -> tuple[int, int | None]:
        """Records a claim; returns its number and its planned offset, if there is one."""
        number = len(self._lives)
        self._clock += 1
        self._lives.append(_Life(nbytes, self._clock))
        if number == 0:
            self._following = self._layouts.get(nbytes)
        layout = self._following
        if layout is None:
            return number, None
        if number >= len(layout.sizes) or layout.sizes[number] != nbytes:
            self.misses += 1
            return number, None
        return number, layout.offsets[number]

    def find(self, space: FreeList, nbytes: int) -> tuple[int, int | None]:
        """Records a claim and allocates its planned place, or by first fit; returns its number and its offset.

        The offset is None where `space` has no room.
        """
        number, planned = self.claim(nbytes)
        if planned is not None:
            if space.allocate_at(planned, nbytes):
                return number, planned
            self.misses += 1
        return number, space.allocate(nbytes)

    def placed(self, number: int, offset: int) -> None:
        """Records the place that claim `number` was given."""
        self._lives[number].offset = offset

    def release(self, number: int, step: int) -> None:
        """Records the release of claim `number`; ignores a claim of an earlier step."""
        self._clock += 1
        if step == self.step:
            self._lives[number].end = self._clock

    def end_step(self, alignment: int, capacity: int) -> bool:
        """Ends a step, all of whose claims have been released; True if it made a layout for the next such step.

        Args:
            alignment: of offsets, in bytes.
            capacity: the most bytes of the layout.
        """
        lives, following, misses = self._lives, self._following, self.misses
        self._lives, self._following, self.misses, self._clock = [], None, 0, 0
        self.step += 1
        if not any(life.end for life in lives) or (following is not None and not misses):
            return False
        first = lives[0].nbytes
        if not self._is_worth_a_plan(first, misses / len(lives)):
            return False
        layout = plan_layout(lives, alignment, capacity)
        if layout is None:
            return False
        self._layouts[first] = layout
        self._layouts.move_to_end(first)
        while len(self._layouts) > KEPT_LAYOUTS:
            self._layouts.popitem(last=False)
        return True

    def _is_worth_a_plan(self, first: int, missed: float) -> bool:
        """True for a step with that first size and share of misses, unless such steps are irregular, or ever others."""
        known = self._known.get(first)
        if known is None:
            known = self._known[first] = _Known()
            if len(self._layouts) == KEPT_LAYOUTS:
                return False  # it may never come again
        known.irregular += missed > IRREGULAR
        if known.irregular >= IRREGULAR_STEPS:
            self._layouts.pop(first, None)
            return False
        known.plans += 1
        return known.plans <= PLANS_EACH


def plan_layout(lives: Sequence[_Life], alignment: int, capacity: int) -> AddressLayout | None:
    """Plans the offsets of one step's claims within `capacity` bytes; None when the solver finds none in time."""
    held = [number for number, life in enumerate(lives) if life.end]
    if (nbytes := _first_fit_nbytes(lives, held, alignment)) is not None:
        sizes = tuple(life.nbytes for life in lives)
        return AddressLayout(sizes=sizes, offsets=(None,) * len(lives), nbytes=nbytes, lower_bound_nbytes=nbytes)
    buffers = [
        Buffer(id=str(number), start=lives[number].start, end=lives[number].end, nbytes=lives[number].nbytes)
        for number in held
    ]
    problem = AddressProblem(buffers=tuple(buffers), alignment=alignment, capacities={DEVICE: capacity})
    try:
        plan = solve(problem, time_limit_s=PLAN_SECONDS, method=Method.SEARCH)
    except (Infeasible, SolverTimeout):
        return None
    offsets: list[int | None] = [None] * len(lives)
    for number, offset in zip(held, plan.offsets, strict=True):
        offsets[number] = offset
    arena = plan.arenas[0]
    return AddressLayout(
        sizes=tuple(life.nbytes for life in lives),
        offsets=tuple(offsets),
        nbytes=arena.nbytes,
        lower_bound_nbytes=arena.lower_bound_nbytes,
    )


def _first_fit_nbytes(lives: Sequence[_Life], held: Sequence[int], alignment: int) -> int | None:
    """Bytes of the arena as the step's claims were placed; None where they might do with fewer, or were not all placed."""
    end = most = now = 0
    changes = []
    for number in held:
        life = lives[number]
        if life.offset is None:
            return None
        nbytes = -(-life.nbytes // alignment) * alignment
        end = max(end, life.offset + nbytes)
        changes += [(life.start, nbytes), (life.end, -nbytes)]
    for _, nbytes in sorted(changes):
        now += nbytes
        most = max(most, now)
    return end if end == most else None
