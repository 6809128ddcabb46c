"""Cut that fits a number of bytes: the nearest corner of the curve below it, and between two corners more storages.

What is added, one by one, are the storages that spare the most seconds for each byte. It is the better of what this greedy
order finds; the best choice of storages is a knapsack. Of very many operators, as of a loop over time, storages are added in
bunches, so that planning takes a time in proportion to the operators.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from memo.swap.recompute.tape.cut import Cut, CutProblem, cheapest, curve

if TYPE_CHECKING:
    from memo.swap.recompute.tape.tape import Tape

_SMALL = 8 * 4096
"""Bits of a storage that is tried even where there is no room for it: a cut with it may keep no more."""
MOST_OPERATORS = 1 << 15
"""Operators of all cuts in which each bunch is tried once: as many storages are a bunch, in the order of their saves."""


def fitting_cut(tape: Tape, problem: CutProblem, wanted: Iterable[int], target: float) -> Cut:
    """The cut of fewest seconds found that keeps at most `target` bits; that of fewest bits where all keep more.

    Args:
        tape: of the call.
        problem: its cuts.
        wanted: storages that autograd saved, and which may be kept or replayed.
        target: bits.

    Raises:
        ValueError: by `cheapest`.
    """
    corners = curve(problem)
    below = [cut for cut in corners if cut.keep_cost <= target]
    if not below:
        return corners[-1]
    cut = min(below, key=lambda cut: (cut.replay_cost, cut.keep_cost))
    kept: list[int] = []
    waiting: list[
        tuple[float, list[int]]
    ] = []  # least first: seconds spared for each byte when last tried, negative; a bunch

    def tried(bunch: list[int]) -> tuple[float, Cut] | None:
        room = target - cut.keep_cost
        more = [storage for storage in bunch if tape.last[storage] not in cut.kept]
        if not more or 8 * sum(tape.storages[storage][1] for storage in more) > room + _SMALL:
            return None
        other = cheapest(_keeping(problem, [tape.last[storage] for storage in (*kept, *bunch)]), 1, 0)
        if other.keep_cost > target or other.replay_cost >= cut.replay_cost:
            return None
        bits = other.keep_cost - cut.keep_cost
        return (other.replay_cost - cut.replay_cost) / max(1, bits), other

    for bunch in _bunches(list(wanted), MOST_OPERATORS // max(1, len(tape.steps))):
        if (found := tried(bunch)) is not None:
            heapq.heappush(waiting, (found[0], bunch))
    while waiting:  # what a storage spares seldom grows while others are added, so only the first is tried again
        _, bunch = heapq.heappop(waiting)
        if (found := tried(bunch)) is None:
            continue
        if waiting and found[0] > waiting[0][0]:
            heapq.heappush(waiting, (found[0], bunch))
        else:
            kept += bunch
            cut = found[1]
    return cut


def _bunches(storages: list[int], most: int) -> list[list[int]]:
    each = max(1, -(-len(storages) // max(1, most)))
    return [storages[at : at + each] for at in range(0, len(storages), each)]


def _keeping(problem: CutProblem, contents: Collection[int]) -> CutProblem:
    """The problem with some contents kept in any case."""
    changed = list(problem.contents)
    for content in contents:
        changed[content] = dataclasses.replace(changed[content], made_by=None)
    return dataclasses.replace(problem, contents=changed)
