"""Choice of a cut: which point of a layer's curve a setting names, and what lies between two corners of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from memo.swap.recompute.tape.bans import NO_BANS, Bans, banned
from memo.swap.recompute.tape.cut import Cut, Problem, cheapest, curve
from memo.swap.recompute.tape.plan import Sources, problem_of
from memo.swap.recompute.tape.recorder import Birth
from memo.swap.token_levels import Level, Mix, Setting, TokenLevels

if TYPE_CHECKING:
    from memo.swap.recompute.agreement import Shared
    from memo.swap.recompute.tape.tape import Tape

__all__ = ["beside_nbytes", "choose", "cut_at", "points_of", "problem_at", "single_level"]

MOST_POINTS = 12
"""Corners of a curve between its ends that a planner is told."""


def choose(
    tape: Tape,
    setting: Setting,
    sources: Sources,
    wanted: Iterable[int],
    stuck: Iterable[int],
    wrong: Iterable[int],
    bans: Bans = NO_BANS,
    agreed: Shared | None = None,
) -> Cut:
    """The cut of a tape for a setting: a named point of its curve, or the one nearest below the bytes of a mixture.

    Steps of `wrong` are never replayed. What was agreed with other ranks decides on their collectives.

    Raises:
        ValueError: a collective that others repeat cannot be replayed.
    """
    never, always = (wrong, ()) if agreed is None else (agreed.never.union(wrong), agreed.always)
    if isinstance(setting, Mix):
        known = points_of(tape, sources, wanted, stuck, never, bans, always)
        target = sum(share * known[name].keep_cost for name, share in setting.points.items() if name in known)
        return min(known.values(), key=lambda cut: (cut.keep_cost > target, abs(target - cut.keep_cost)))
    levels = setting if isinstance(setting, TokenLevels) else None
    named = setting if isinstance(setting, Level) else single_level(levels)
    if named is not None:
        return cut_at(tape, named, sources, wanted, stuck, never, bans, always)
    assert levels is not None
    most = sum(8 * tape.storages[storage][1] for storage in (*wanted, *stuck))
    attention = cut_at(tape, Level.SAVE_ATTENTION, sources, wanted, stuck, wrong, bans)
    matmuls = cut_at(tape, Level.SAVE_MATMULS, sources, wanted, stuck, wrong, bans)
    target = levels.all * most + levels.matmuls * matmuls.keep_cost + levels.attention * attention.keep_cost
    problem = problem_at(tape, Level.SAVE_ATTENTION, sources, wanted, stuck, never, bans, always)
    points = curve(problem)
    below = [cut for cut in points if cut.keep_cost <= target]
    if not below:
        return cut_at(tape, Level.SAVE_ATTENTION, sources, wanted, stuck, never, bans, always)
    best = min(below, key=lambda cut: (cut.replay_cost, cut.keep_cost))
    return _filled(tape, problem, best, target, tuple(wanted), tuple(stuck))


def _filled(
    tape: Tape, problem: Problem, cut: Cut, target: float, wanted: tuple[int, ...], stuck: tuple[int, ...]
) -> Cut:
    """A cut between two corners of the curve: more storages are kept, one by one, while the bytes allow it.

    In the order of the seconds that they spare for each byte. It is the better of what this greedy order finds; the best
    choice of storages is a knapsack.
    """
    kept = list(stuck)
    while True:
        best: tuple[float, int, Cut] | None = None
        for storage in wanted:
            room = target - cut.keep_cost
            if storage in kept or tape.last[storage] in cut.kept or 8 * tape.storages[storage][1] > room + 8 * 4096:
                continue
            other = cheapest(_keeping(problem, [tape.last[other] for other in (*kept, storage)]), 1, 0)
            more = other.keep_cost - cut.keep_cost
            if other.keep_cost <= target and other.replay_cost < cut.replay_cost:
                gain = (cut.replay_cost - other.replay_cost) / max(1, more)
                if best is None or gain > best[0]:
                    best = gain, storage, other
        if best is None:
            return cut
        kept.append(best[1])
        cut = best[2]


def _keeping(problem: Problem, contents: Collection[int]) -> Problem:
    """The problem with some contents kept in any case."""
    changed = list(problem.contents)
    for content in contents:
        changed[content] = dataclasses.replace(changed[content], made_by=None)
    return dataclasses.replace(problem, contents=changed)


def points_of(
    tape: Tape,
    sources: Sources,
    wanted: Iterable[int],
    stuck: Iterable[int],
    wrong: Iterable[int],
    bans: Bans,
    always: Iterable[int] = (),
) -> dict[str, Cut]:
    """The corners of the curve at which attention is never repeated, by name: `all`, `p1` and so on, `attention`.

    Of many corners some are left out, which a planner would not tell apart.
    """
    corners = curve(
        problem_at(tape, Level.SAVE_ATTENTION, sources, tuple(wanted), tuple(stuck), tuple(wrong), bans, always)
    )
    inner = corners[1:-1]
    inner = inner[:: -(-len(inner) // MOST_POINTS) or 1]
    found = {"all": corners[0], **{f"p{number}": cut for number, cut in enumerate(inner, 1)}}
    if len(corners) > 1:
        found["attention"] = corners[-1]
    return found


def beside_nbytes(tape: Tape, cut: Cut, saved: Collection[int]) -> int:
    """Bytes that a cut keeps and autograd does not save."""
    return sum(
        tape.storage(content)[1]
        for content in cut.kept
        if tape.contents[content].storage not in saved and tape.storage(content)[0] is Birth.MADE
    )


def single_level(levels: TokenLevels | None) -> Level | None:
    """The level that all tokens are at; None for several."""
    if levels is None:
        return None
    if levels.attention >= 1:
        return Level.SAVE_ATTENTION
    return Level.SAVE_MATMULS if levels.matmuls >= 1 else None


def cut_at(
    tape: Tape,
    level: Level,
    sources: Sources,
    wanted: Iterable[int],
    stuck: Iterable[int],
    wrong: Iterable[int],
    bans: Bans,
    always: Iterable[int] = (),
) -> Cut:
    """The cut with the fewest bytes at a level."""
    return cheapest(problem_at(tape, level, sources, wanted, stuck, wrong, bans, always), 1, 0)


def problem_at(
    tape: Tape,
    level: Level,
    sources: Sources,
    wanted: Iterable[int],
    stuck: Iterable[int],
    wrong: Iterable[int],
    bans: Bans,
    always: Iterable[int] = (),
) -> Problem:
    """The problem of a tape at a level."""
    never = banned(tape, level, chosen=bans, also=wrong)
    return problem_of(tape, never, sources, wanted, stuck, tape.costs, always)
