"""Longest sequence that some layout of a space has a plan for, under the division of the step that holds least.

Owns the question alone; whether a layout fits is the planner's word. More tokens need no less memory, so the longest
sequence of a shape is found by bisection, in steps of tokens that its ranks divide. A shape is first asked for one step more
than the shapes before it reached, which most answer with no.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from memo.errors import Infeasible, UsageError
from memo.mip.activation import fits, misfit_of
from memo.search.bounds import has_room
from memo.search.candidates import Candidate, Shape
from memo.search.space import Space

MOST_TOKENS = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LongestFit:
    """The longest sequence that fits, and a layout that it fits."""

    space: Space
    """The space at this length."""
    candidate: Candidate
    """One that holds it; another may be faster."""
    tile: int
    """Tokens by which lengths that the candidate's ranks divide differ."""
    binds: str | None
    """Why the next length does not fit the candidate; None where the search ended first."""

    @property
    def tokens(self) -> int:
        """Tokens of the sequence."""
        return self.space.request.layout.tokens


def longest_that_fits(space: Space, *, tile: int, say: Callable[[str], None] = lambda text: None) -> LongestFit | None:
    """Finds the longest sequence that some layout fits; None where the shortest one fits none.

    Args:
        space: of a length that the ranks of all layouts divide which are to be asked.
        tile: even number of tokens of each context-parallel rank by which lengths differ.
        say: called with a few words of progress.
    """
    longest: LongestFit | None = None
    order = sorted(space.shapes, key=lambda shape: (-shape.gpus, shape.pp, shape.dp, -shape.cp, shape.tp))
    for number, shape in enumerate(order):
        reached = 0 if longest is None else longest.tokens
        say(f"{number} of {len(order)} layouts asked, longest sequence {reached:,} tokens")
        longest = _longer(space, shape, math.lcm(tile, shape.tp) * shape.cp, reached) or longest
    return longest


def leanest(space: Space, shape: Shape) -> list[Candidate]:
    """Candidates of a shape with the smallest microbatch and the fewest chunks, the simplest and most sharded first.

    One of them holds least: a shallow model has more weights gathered at a time than sharding takes off a rank.
    """
    for setting in space.settings(shape):
        if bare := space.schedules(shape, setting):
            fewest = min(one.chunks for one in bare)
            found = (each for one in bare if one.chunks == fewest for each in space.shardings(one))
            return sorted(found, key=lambda one: one.key)
    return []


def fits_any_plan(space: Space, candidate: Candidate) -> bool:
    """Whether the candidate has a plan."""
    return any(_fits(space, candidate, tiles) for tiles in space.request.leanest_tiles)


def _fits(space: Space, candidate: Candidate, tiles: int) -> bool:
    try:
        problem = space.problem(candidate, tiles)
    except UsageError:  # the host has no room for what is to be there in any case
        return False
    return has_room(problem) and fits(problem)


def last_that_fits(does_fit: Callable[[int], bool], low: int, *, tile: int) -> tuple[int, int | None]:
    """The most tiles of tokens that fit, from `low` on, which do.

    Args:
        does_fit: whether so many do; where more do, fewer do, too.
        low: number of tiles.
        tile: tokens of each.

    Returns:
        These, and the next number; None where longer ones were not tried.
    """
    high = 2 * low
    while low * tile < MOST_TOKENS and does_fit(high):
        low, high = high, 2 * high
    if low * tile >= MOST_TOKENS:
        return low, None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does_fit(middle) else (low, middle)
    return low, high


def _longer(space: Space, shape: Shape, tile: int, reached: int) -> LongestFit | None:
    """The longest sequence of one shape; None where that is no longer than `reached` tokens."""
    known: dict[int, Candidate] = {}

    def does_fit(tiles: int) -> bool:
        longer = _of_length(space, tiles * tile)
        found = next((one for one in leanest(longer, shape) if fits_any_plan(longer, one)), None)
        if found is not None:
            known[tiles] = found
        return found is not None

    low = reached // tile + 1
    if not does_fit(low):
        return None
    low, high = last_that_fits(does_fit, low, tile=tile)
    binds = None if high is None else _lacks(_of_length(space, high * tile), shape)
    return LongestFit(space=_of_length(space, low * tile), candidate=known[low], tile=tile, binds=binds)


def _of_length(space: Space, tokens: int) -> Space:
    request = space.request
    return dataclasses.replace(
        space, request=dataclasses.replace(request, layout=dataclasses.replace(request.layout, tokens=tokens))
    )


def _lacks(space: Space, shape: Shape) -> str:
    """Words for the bytes that the shape's first leanest candidate lacks."""
    try:
        return str(misfit_of(space.problem(leanest(space, shape)[0], space.request.tiles[-1])))
    except (Infeasible, UsageError) as error:
        return str(error)
