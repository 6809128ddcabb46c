"""Choice of a cut: which point of a layer's curve a setting names, and what lies between two corners of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from memo.swap.levels import Level, Setting
from memo.swap.recompute.tape.bans import NO_BANS, Bans, banned
from memo.swap.recompute.tape.cut import Cut, CutProblem, cheapest, curve
from memo.swap.recompute.tape.fitting import fitting_cut
from memo.swap.recompute.tape.log import Origin
from memo.swap.recompute.tape.plan import Plan, Sources, keep_bits, plan_of, problem_of

if TYPE_CHECKING:
    from memo.swap.recompute.agreement import Shared
    from memo.swap.recompute.tape.tape import Tape

MOST_POINTS = 12
"""Corners of a curve between its ends that a planner is told."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Choice that a recorded call leaves. Holds no tensor.

    Args:
        tape: of the call.
        sources: what can be kept of it.
        wanted: storages that autograd saved and that a replay may give.
        stuck: storages that autograd saved and that move in any case.
        bans: operators that the user keeps or repeats by name.
        never: steps that are not repeated.
        always: steps that are repeated, needed or not.
    """

    tape: Tape
    sources: Sources
    wanted: tuple[int, ...]
    stuck: tuple[int, ...]
    bans: Bans = NO_BANS
    never: frozenset[int] = frozenset()
    always: frozenset[int] = frozenset()

    @property
    def for_next(self) -> Choice:
        """The choice of a call that is recorded for a plan, and so can keep all that it makes."""
        return dataclasses.replace(self, sources=dataclasses.replace(self.sources, everything=True))

    @property
    def saved_nbytes(self) -> int:
        """Bytes of all storages that autograd saved."""
        return sum(self.tape.storages[storage][1] for storage in (*self.wanted, *self.stuck))

    def under(self, shared: Shared, wrong: Iterable[int] = ()) -> Choice:
        """The choice that an agreement with other ranks leaves, without steps that a trial found wrong."""
        return dataclasses.replace(self, never=shared.never.union(wrong), always=shared.always)

    def banned(self, level: Level) -> dict[int, str]:
        """Steps that are not repeated at a level, each with the reason."""
        return banned(self.tape, level, chosen=self.bans, also=self.never)

    def problem(self, level: Level) -> CutProblem:
        """The minimum cut problem at a level."""
        return problem_of(
            self.tape, self.banned(level), self.sources, self.wanted, self.stuck, self.tape.costs, self.always
        )

    def at(self, level: Level) -> Cut:
        """The cut of a level: the one with the fewest bytes that repeats no more.

        Raises:
            ValueError: a step that other ranks repeat cannot be repeated here.
        """
        if level is Level.SAVE_ALL:
            return cheapest(self.problem(Level.SAVE_ATTENTION), 0, 1)
        return cheapest(self.problem(level), 1, 0)

    def cut(self, setting: Setting) -> Cut:
        """The cut for a setting: a point of the curve, or the cheapest cut that keeps at most the bytes of several.

        Raises:
            ValueError: a step that other ranks repeat cannot be repeated here.
        """
        if isinstance(setting, Level):
            return self.at(setting)
        free = dataclasses.replace(self.for_next, never=frozenset(), always=frozenset())
        best = None
        if (
            self != free
        ):  # points are named, and bytes counted, on the curve of a call in which all can be kept and replayed
            best = free.cut(setting)
            if self._allows(best):
                return best
        known = self.points()
        if setting.point is not None:
            if best is None and setting.point in known:
                return known[setting.point]
            corners = [cut for name, cut in known.items() if name != "input"]
            small = [cut for cut in corners if best is not None and cut.keep_cost <= best.keep_cost]
            return small[0] if small else corners[-1]  # they go from the least replayed to the least kept
        bits = {"matmuls": self.at(Level.SAVE_MATMULS).keep_cost, "input": self.at(Level.SAVE_INPUT).keep_cost}
        bits |= {name: cut.keep_cost for name, cut in known.items()}
        target = sum(share * bits.get(name, bits["input"]) for name, share in setting.points.items())
        return fitting_cut(self.tape, self.problem(Level.SAVE_ATTENTION), self.wanted, target)

    def _allows(self, best: Cut) -> bool:
        """True for a cut that keeps only what is there, at the same cost, and repeats only what may and all that must be."""
        there, wished = self.sources, self.for_next.sources
        return (
            self.never.isdisjoint(best.replayed)
            and self.always <= best.replayed
            and all(keep_bits(self.tape, at, there) == keep_bits(self.tape, at, wished) for at in best.kept)
        )

    def points(self) -> dict[str, Cut]:
        """The corners of the curve at which attention is never repeated, by name: `all`, `p1` and so on, `attention`.

        Of many corners some are left out, which a planner would not tell apart. `input` is the last, where it keeps less.
        """
        corners = curve(self.problem(Level.SAVE_ATTENTION))
        inner = corners[1:-1]
        inner = inner[:: -(-len(inner) // MOST_POINTS) or 1]
        found = {"all": corners[0], **{f"p{number}": cut for number, cut in enumerate(inner, 1)}}
        if len(corners) > 1:
            found["attention"] = corners[-1]
        least = self.at(Level.SAVE_INPUT)
        if least.keep_cost < corners[-1].keep_cost:
            found["input"] = least
        return found

    def plan(self, cut: Cut) -> Plan:
        """The plan of a cut."""
        return plan_of(self.tape, cut, self.sources, self.wanted)

    def moved_by(self, plan: Plan) -> set[int]:
        """Storages that move by a plan: what its replay does not give, and what is kept for it. Masks are left out."""
        kept = {item.storage for item in plan.kept if item.bits_of < 0} - self.sources.free - self.sources.lent
        return ({*self.wanted, *self.stuck} - set(plan.wanted)) | kept

    def beside_nbytes(self, cut: Cut, saved: Collection[int]) -> int:
        """Bytes that a cut keeps and autograd does not save."""
        tape, there = self.tape, self.sources.free.union(saved)
        return sum(
            tape.storage(content)[1]
            for content in cut.kept
            if tape.contents[content].storage not in there and tape.storage(content)[0] is Origin.MADE
        )
