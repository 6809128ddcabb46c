"""Layout of the host arena: a step's claims are recorded, planned by `memo.mip`, and followed in the next step.

First fit leaves holes; the plan leaves none, since a training step asks for the same bytes in the same order again. A
plan is advice: a claim that does not match it, or whose place is still taken because a copy drains at its own pace, is
served by first fit and counted, and a step with such a claim is recorded for the next plan. So a wrong plan costs room and
never bytes.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from memo.errors import Infeasible, SolverTimeout
from memo.mip.address import DEVICE, Buffer, Method, Problem, solve

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Layout", "StepRecorder", "plan_layout"]

PLAN_SECONDS = 1.0  # for one plan; the portfolio needs a few milliseconds for a step of 1,000 storages
KEPT_LAYOUTS = 8  # sequence lengths that a run may alternate between without planning again
PLANS_EACH = 3  # how often a kind of step is planned anew before its irregular claims are left to first fit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The planned offsets of one step's claims, in order; None for a claim that the arena refused."""

    sizes: tuple[int, ...]
    offsets: tuple[int | None, ...]
    nbytes: int
    """How large the arena has to be."""
    lower_bound_nbytes: int


@dataclasses.dataclass(slots=True)
class _Life:
    nbytes: int
    start: int
    end: int = 0
    """When the place was given back; 0 for a claim that never got one."""


class StepRecorder:
    """The claims and releases of the step under way, and the layouts of earlier steps by the size of their first claim."""

    def __init__(self) -> None:
        self.step = 0
        """Which step the claims now belong to."""
        self.misses = 0
        """Claims of this step that did not get the place planned for them."""
        self._clock = 0
        self._lives: list[_Life] = []
        self._layouts: collections.OrderedDict[int, Layout] = collections.OrderedDict()
        self._planned: collections.Counter[int] = collections.Counter()
        self._following: Layout | None = None

    @property
    def nbytes(self) -> int:
        """What the largest layout needs."""
        return max((layout.nbytes for layout in self._layouts.values()), default=0)

    def claim(self, nbytes: int) -> tuple[int, int | None]:
        """Notes a claim; (its number, the planned offset or None)."""
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

    def missed(self) -> None:
        """The planned place was taken."""
        self.misses += 1

    def release(self, number: int, step: int) -> None:
        """Notes a release; one that belongs to an earlier step is not part of this one's record."""
        self._clock += 1
        if step == self.step:
            self._lives[number].end = self._clock

    def end_step(self, alignment: int, capacity: int) -> bool:
        """Everything claimed has been released. True if a layout was made that the next such step will follow."""
        lives, following, misses = self._lives, self._following, self.misses
        self._lives, self._following, self.misses, self._clock = [], None, 0, 0
        self.step += 1
        if not any(life.end for life in lives) or (following is not None and not misses):
            return False
        first = lives[0].nbytes
        if self._planned[first] == PLANS_EACH:
            return False
        self._planned[first] += 1
        layout = plan_layout(lives, alignment, capacity)
        if layout is None:
            return False
        self._layouts[first] = layout
        self._layouts.move_to_end(first)
        while len(self._layouts) > KEPT_LAYOUTS:
            self._layouts.popitem(last=False)
        return True


def plan_layout(lives: Sequence[_Life], alignment: int, capacity: int) -> Layout | None:
    """Offsets for one step's storages within `capacity` bytes; None when the planner found none in its time."""
    held = [number for number, life in enumerate(lives) if life.end]
    buffers = [
        Buffer(id=str(number), start=lives[number].start, end=lives[number].end, nbytes=lives[number].nbytes)
        for number in held
    ]
    problem = Problem(buffers=tuple(buffers), alignment=alignment, capacities={DEVICE: capacity})
    try:
        plan = solve(problem, time_limit_s=PLAN_SECONDS, method=Method.SEARCH)
    except (Infeasible, SolverTimeout):
        return None
    offsets: list[int | None] = [None] * len(lives)
    for number, offset in zip(held, plan.offsets, strict=True):
        offsets[number] = offset
    arena = plan.arenas[0]
    return Layout(
        sizes=tuple(life.nbytes for life in lives),
        offsets=tuple(offsets),
        nbytes=arena.nbytes,
        lower_bound_nbytes=arena.lower_bound_nbytes,
    )
