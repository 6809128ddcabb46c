"""`memo plan --max-seq` and `--gpus auto`: the longest sequence that fits, and the fewest GPUs that do.

Both ask the planner itself, many times. A length fits if some plan of it keeps the budgets; longer sequences need no less
memory, so the longest one is found by bisection, and the next one is planned, too, to say what it lacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from memo.cli.planning.request import TILE_TOKENS
from memo.errors import Infeasible, UsageError
from memo.search import last_that_fits
from memo.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from memo.search import Request

OFFLOAD = "--optimizer-offload"
LONGER = 1.25
"""Factor by which a change that is proposed must lengthen the sequence."""


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
    """A change of the command that lengthens the sequence by a quarter or more; None where none was found."""


def longest_sequence(request: Request) -> Longest:
    """Finds the longest sequence that fits, in multiples of TILE_TOKENS tokens for each context-parallel rank.

    Raises:
        Infeasible: not even one tile fits; the message says what it lacks.
    """
    tile = TILE_TOKENS * request.layout.cp

    def does_fit(tiles: int) -> bool:
        return _of_length(request, tiles * tile).fits()

    if not does_fit(1):
        _of_length(request, tile).plan()  # raises
    low, high = last_that_fits(does_fit, 1, tile=tile)
    longest = _of_length(request, low * tile)
    if high is None:
        return Longest(request=longest, tile=tile, binds=None, proposal=None)
    return Longest(
        request=longest,
        tile=tile,
        binds=_lacks(_of_length(request, high * tile)),
        proposal=_proposal(request, tokens=max(high, round(LONGER * low)) * tile),
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
        f"{_lacks(request_of(gpus=tried[-1]))}"
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


def gpu_counts(step: int, gpus_per_node: int) -> Iterator[int]:
    """1, 2, 4, 8 and so on in one node, then whole nodes: those that `step` divides."""
    counts = [1 << power for power in range(20) if 1 << power < gpus_per_node] + [gpus_per_node]
    nodes = [nodes * gpus_per_node for nodes in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
    found = sorted({gpus for gpus in (step, *counts, *nodes) if gpus >= step and gpus % step == 0})
    yield from found


def _of_length(request: Request, tokens: int) -> Request:
    return dataclasses.replace(request, layout=dataclasses.replace(request.layout, tokens=tokens))


def _lacks(request: Request) -> str:
    """Message of a request that does not fit: the bytes that it lacks."""
    tiles = request.tiles[-1:]
    try:
        dataclasses.replace(request, tiles=tiles).plan()
    except Infeasible as error:
        return str(error)
    return "no plan fits"


def _proposal(request: Request, *, tokens: int) -> str | None:
    """The first of a few changes with which a longer sequence fits."""
    changes = _changes(request)
    return next((words for words, one in changes if _does_fit(lambda one=one: _of_length(one, tokens))), None)  # type: ignore[misc]


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    """Changes of a command, from the cheapest on."""
    layout, budgets = request.layout, request.budgets
    without_logits = request.without_logits()
    if without_logits is not None:
        yield "--loss-without-logits, which is memo.loss_without_logits(model)", without_logits
    if request.profile is None and request.zero < 3 and layout.gpus > 1:
        yield "--zero 3", dataclasses.replace(request, zero=3)
    more = dataclasses.replace(budgets, host_bytes=2 * budgets.host_bytes)
    if budgets.host_bytes:
        given = dataclasses.replace(request, budgets=more, shares_host=False)
        yield f"--host {format_bytes(more.host_bytes).replace(' ', '')}", given
    if request.profile is None:
        gpus, cp = 2 * layout.gpus, 2 * layout.cp
        yield f"--gpus {gpus}", request.on(gpus=gpus)
        yield f"--gpus {gpus} --cp {cp}", request.on(gpus=gpus, cp=cp)
    if request.profile is None and not request.optimizer_offload:
        note = f" ({request.offload_note})" if request.offload_note else ""
        yield f"{OFFLOAD}{note}", dataclasses.replace(request, optimizer_offload=True)


def describe_longest(found: Longest) -> str:
    """Two or three sentences: the length, what binds, what would lengthen it."""
    tokens = found.request.layout.tokens
    lines = [f"longest sequence that fits: {format_tokens(tokens)} tokens ({tokens:,}), in steps of {found.tile:,}"]
    if found.binds is None:
        lines.append("longer ones were not tried")
    else:
        lines.append(f"{found.tile:,} tokens more do not fit: {found.binds.replace('no plan fits: ', '')}")
        lines.append(
            "none of a few changes of the command lengthens it by a quarter"
            if found.proposal is None
            else f"a quarter longer or more: {found.proposal}"
        )
    return "\n".join(lines)
