"""`memo plan --max-seq` and `--gpus auto`: the longest sequence that fits, and the fewest GPUs that do.

Both ask the planner itself, many times. A length fits if some plan of it keeps the budgets; longer sequences need no less
memory, so the longest one is found by bisection, and the next one is planned, too, to say what it lacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from memo.cli.planning.changes import changes_that_fit, described, gpu_counts
from memo.cli.planning.request import TILE_TOKENS
from memo.errors import Infeasible, UsageError
from memo.mip.activation import DoesNotFit
from memo.search import last_that_fits
from memo.units import format_tokens

if TYPE_CHECKING:
    from memo.search import Request

LONGER = 1.25
"""Factor by which changes that are proposed must lengthen the sequence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """Result of the search for the longest sequence."""

    request: Request
    """Request for the longest sequence that fits."""
    tile: int
    """Tokens by which lengths differ."""
    binds: str | None
    """Why the next length does not fit; None where the search ended first."""
    proposal: str | None
    """Changes of the command that each lengthen the sequence by a quarter or more; None where none was found."""


def longest_sequence(request: Request, *, say: Callable[[str], None]) -> Longest:
    """Finds the longest sequence that fits, in multiples of TILE_TOKENS tokens for each context-parallel rank.

    Args:
        request: the request, of any length; one tile of it fits.
        say: is told which changes are tried.
    """
    tile = TILE_TOKENS * request.layout.cp

    def does_fit(tiles: int) -> bool:
        return _of_length(request, tiles * tile).fits()

    low, high = last_that_fits(does_fit, 1, tile=tile)
    longest = _of_length(request, low * tile)
    if high is None:
        return Longest(request=longest, tile=tile, binds=None, proposal=None)
    longer = _of_length(request, max(high, round(LONGER * low)) * tile)
    changes = changes_that_fit(longer, _misfit(longer), say=say, shortens=False)
    return Longest(
        request=longest,
        tile=tile,
        binds=str(_misfit(_of_length(request, high * tile))),
        proposal=described(request, changes) or None,
    )


def fewest_gpus(request_of: Callable[..., Request], first: Request) -> tuple[Request, list[int]]:
    """Finds the fewest GPUs that some plan fits, as asked for or by context or tensor parallelism within a node.

    Args:
        request_of: returns the request with other --gpus, and --cp or --tp.
        first: the request on so many GPUs as its layout needs.

    Returns:
        The request as asked for or, where that does not fit, the fastest of the others, and the numbers of GPUs that do
        not fit.

    Raises:
        Infeasible: no number that was tried fits.
    """
    tried: list[int] = []
    for gpus in gpu_counts(first.layout.gpus, first.machine.gpus_per_node):
        if _does_fit(lambda gpus=gpus: request_of(gpus=gpus)):  # type: ignore[misc]
            return request_of(gpus=gpus), tried
        divided = [{"gpus": gpus, **ranks} for ranks in _more_ranks(first, gpus)]
        fitting = [ranks for ranks in divided if _does_fit(lambda ranks=ranks: request_of(**ranks))]  # type: ignore[misc]
        if fitting:
            return min((request_of(**ranks) for ranks in fitting), key=_seconds_per_token), tried
        tried.append(gpus)
    named = ", ".join(map(str, tried))
    raise Infeasible(
        f"no number of GPUs that was tried fits ({named}), with --cp or --tp of up to a node; with {tried[-1]}: "
        f"{_misfit(request_of(gpus=tried[-1]))}"
    )


def _more_ranks(first: Request, gpus: int) -> Iterator[dict[str, int]]:
    """--cp or --tp of 2 up to a node where they are 1 and the GPUs divide by them."""
    layout, node = first.layout, first.machine.gpus_per_node
    for name in ("cp", "tp"):
        ranks = 2 if getattr(layout, name) == 1 else node + 1
        while ranks * layout.tp * layout.cp <= node and gpus % (ranks * layout.gpus) == 0:
            yield {name: ranks}
            ranks *= 2


def _seconds_per_token(request: Request) -> float:
    plan = request.plan()
    return plan.step_s / plan.problem.step_tokens


def _does_fit(request_of: Callable[[], Request]) -> bool:
    try:
        return request_of().fits()
    except UsageError:  # the layout does not divide the model, or the host has no room
        return False


def _of_length(request: Request, tokens: int) -> Request:
    return dataclasses.replace(request, layout=dataclasses.replace(request.layout, tokens=tokens))


def _misfit(request: Request) -> DoesNotFit:
    """Answer of a request that does not fit: what it lacks."""
    try:
        dataclasses.replace(request, tiles=request.tiles[-1:]).plan()
    except DoesNotFit as error:
        return error
    raise AssertionError("it fits")


def describe_longest(found: Longest) -> str:
    """Two or three sentences: the length, what binds, what would lengthen it."""
    tokens = found.request.layout.tokens
    lines = [f"longest sequence that fits: {format_tokens(tokens)} tokens ({tokens:,}), in steps of {found.tile:,}"]
    if found.binds is None:
        lines.append("longer ones were not tried")
    else:
        lines.append(f"{found.tile:,} tokens more do not fit: {found.binds.replace('no plan fits: ', '')}")
        lines.append(
            "no change that was tried lengthens it by a quarter"
            if found.proposal is None
            else f"a quarter longer or more: {found.proposal}"
        )
    return "\n".join(lines)
