"""Comparison of ranks' collectives with the plan's model of them, and with one another.

Pure functions over recorded calls. A disagreement names the rank, the collective and both figures. Ranks that do not
issue the same collectives in the same order would wait for one another for ever.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memo.gpt.arithmetic import Collective, CollectiveKind, Ranks
from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.dry_run.places import Place
    from memo.dry_run.recorded_collectives import CollectiveCall

GROUPS = (
    Ranks.TENSOR,
    Ranks.CONTEXT,
    Ranks.REPLICAS,
    Ranks.TOKENS,
    Ranks.EXPERTS,
    Ranks.EXPERT_COPIES,
    Ranks.STAGES,
    Ranks.ENDS,
    Ranks.ALL,
)
"""Groups that a rank of `memo train` has."""

_MESSAGES = (CollectiveKind.SEND, CollectiveKind.RECEIVE)


def against_plan(
    place: Place, calls: Sequence[CollectiveCall], planned: Iterable[Collective], again: Iterable[Collective] = ()
) -> list[str]:
    """Says where a rank's collectives are not those of the plan's model, kind by kind and size by size.

    Args:
        place: of the rank.
        calls: its collectives in one step.
        planned: those of the plan's model, without recompute.
        again: at most what recompute repeats, in calls of any size; none where nothing is recomputed.
    """
    room: collections.Counter[tuple[CollectiveKind, tuple[int, ...]]] = collections.Counter()
    for each in again:
        room[each.kind, place.group(each.ranks)] += math.ceil(each.nbytes * each.count)
    expected: collections.Counter[tuple[CollectiveKind, tuple[int, ...], float]] = collections.Counter()
    names: dict[tuple[int, ...], Ranks] = {}
    for group in GROUPS:
        names.setdefault(place.group(group), group)
    for each in planned:
        expected[each.kind, place.group(each.ranks), each.nbytes] += each.count
    issued = collections.Counter((call.kind, call.ranks, float(call.nbytes)) for call in calls)
    wrong = []
    for key in dict.fromkeys((*issued, *expected)):
        kind, ranks, nbytes = key
        more = (issued[key] - expected[key]) * nbytes
        if 0 < more <= room[kind, ranks]:
            room[kind, ranks] -= int(more)
        elif issued[key] != expected[key]:
            over = f"{names[ranks]} ({len(ranks)} ranks)" if ranks in names else f"ranks {_listed(ranks)}"
            wrong.append(
                f"rank {place.rank}: {kind} of {nbytes:,.0f} bytes over {over}: the step issues {issued[key]:,}, the plan "
                f"counts {expected[key]:,}"
            )
    return wrong


def memberships(place: Place, groups: Mapping[Ranks, Sequence[int]]) -> list[str]:
    """Says which of a rank's process groups do not have the ranks that its place in the layout gives them."""
    return [
        f"rank {place.rank}: its group {name} has the ranks {_listed(ranks)}, and by its place {_listed(place.group(name))}"
        for name, ranks in groups.items()
        if tuple(ranks) != place.group(name)
    ]


def moved_to(calls: Sequence[CollectiveCall], here: Place, there: Place) -> list[CollectiveCall]:
    """Returns the calls as another rank of the same kind issues them: over its own groups, with its own peers."""
    own = {here.group(group): there.group(group) for group in GROUPS}
    found = []
    for call in calls:
        ranks = own.get(call.ranks)
        if ranks is None:  # a group that no place gives; `against_plan` has said so
            continue
        peer = None if call.peer is None else ranks[call.ranks.index(call.peer)]
        if call.kind is CollectiveKind.ROTATE:
            peer = ranks[(ranks.index(there.rank) + 1) % len(ranks)] if _is_next(call, here) else peer
        found.append(dataclasses.replace(call, ranks=ranks, peer=peer))
    return found


def _is_next(call: CollectiveCall, here: Place) -> bool:
    at = call.ranks.index(here.rank)
    return call.peer == call.ranks[(at + 1) % len(call.ranks)]


def among_ranks(calls: Mapping[int, Sequence[CollectiveCall]]) -> list[str]:
    """Says where members of a group do not issue the same collectives in the same order, or a message has no receiver.

    Args:
        calls: of each rank, by its global number.
    """
    by_group: dict[tuple[int, ...], dict[int, list[CollectiveCall]]] = {}
    for rank, own in calls.items():
        for call in own:
            by_group.setdefault(call.ranks, {}).setdefault(rank, []).append(call)
    wrong: list[str] = []
    for ranks, members in by_group.items():
        wrong += _same_order(ranks, members, calls)
        wrong += _messages_arrive(members, calls)
    return wrong


def _same_order(
    ranks: tuple[int, ...], members: Mapping[int, Sequence[CollectiveCall]], calls: Mapping[int, object]
) -> Iterator[str]:
    present = [rank for rank in ranks if rank in calls]
    orders = {rank: [_look(call) for call in members.get(rank, ()) if call.kind not in _MESSAGES] for rank in present}
    first = present[0]
    for rank in present[1:]:
        if orders[rank] == orders[first]:
            continue
        pairs = itertools.zip_longest(orders[first], orders[rank])
        number, (one, other) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
        yield (
            f"rank {rank}: collective {number} of its group {_listed(ranks)} is {_said(other)}, and on rank {first} "
            f"{_said(one)}; they would wait for one another"
        )
        return


def _look(call: CollectiveCall) -> tuple[CollectiveKind, tuple[int, ...], str]:
    """Properties that must be equal on all members of a group."""
    return call.kind, call.shape, call.dtype


def _said(look: tuple[CollectiveKind, tuple[int, ...], str] | None) -> str:
    return "nothing" if look is None else f"{look[0]} of {look[2]} {list(look[1])}"


def _messages_arrive(members: Mapping[int, Sequence[CollectiveCall]], calls: Mapping[int, object]) -> Iterator[str]:
    """Messages from each rank to each other one, in order, against what that one expects."""
    sent: dict[tuple[int, int], list[CollectiveCall]] = {}
    wanted: dict[tuple[int, int], list[CollectiveCall]] = {}
    for rank, own in members.items():
        for call in own:
            if call.peer is None or call.peer not in calls:
                continue
            if call.kind is CollectiveKind.SEND:
                sent.setdefault((rank, call.peer), []).append(call)
            elif call.kind is CollectiveKind.RECEIVE:
                wanted.setdefault((call.peer, rank), []).append(call)
    for pair in dict.fromkeys((*sent, *wanted)):
        there = [(call.shape, call.dtype) for call in sent.get(pair, ())]
        here = [(call.shape, call.dtype) for call in wanted.get(pair, ())]
        if there == here:
            continue
        number, (one, other) = next(
            (n, both) for n, both in enumerate(itertools.zip_longest(there, here)) if both[0] != both[1]
        )
        yield (
            f"rank {pair[0]}: message {number} to rank {pair[1]} is {_message(one)}, and that rank expects "
            f"{_message(other)}"
        )


def _message(look: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if look is None else f"{look[1]} {list(look[0])}"


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return f"[{shown}, ... {len(ranks)} in all]" if len(ranks) > most else f"[{shown}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Distance that the bytes of a stage's fullest rank may have from the plan's: a part of these, and a number of bytes."""

    above: float
    below: float
    nbytes: int


# Measured on 2026-11-24 over 40 plans of 0.1b to 13b, all schedules, precisions and kinds of parallelism, of 2 to 256 ranks.
STATES = Tolerance(above=0.01, below=0.01, nbytes=1 << 20)
"""Tolerance for weights and optimizer state. Measured: 0.1 % more, by the rows with which FSDP fills up shards."""
PEAK = Tolerance(above=0.02, below=0.2, nbytes=32 << 20)
"""Tolerance for the peak. Measured: 1.2 % more. As much as 16 % less where sequences are short, since the plan adds the most
of each transient, and those of different layers and of the ends do not all come at once; 5 % less from 64k tokens on."""
SMALL = 0.05
"""Largest fraction of what is planned by which a tolerance in bytes lets a rank hold more."""


def memory(
    of_ranks: Mapping[int, int], planned: int, tolerance: Tolerance, *, stage: int, what: str = "its step holds"
) -> list[str]:
    """Says where ranks of a stage hold more than the plan says, or even the fullest one less.

    Args:
        of_ranks: bytes by the number of a rank, of one rank of each kind in the stage.
        planned: the plan's bytes of a rank of the stage.
        tolerance: how far apart the two may be.
        stage: number of the stage.
        what: of a message, what the bytes are.
    """
    most = planned * (1 + tolerance.above) + min(tolerance.nbytes, planned * SMALL)
    wrong = [rank for rank, nbytes in of_ranks.items() if nbytes > most]
    fullest = max(of_ranks, key=lambda rank: of_ranks[rank])
    if of_ranks[fullest] < planned * (1 - tolerance.below) - tolerance.nbytes:
        wrong.append(fullest)
    return [
        f"rank {rank}: {what} {format_bytes(of_ranks[rank])} on the device, the plan says {format_bytes(planned)} of stage "
        f"{stage}"
        for rank in wrong
    ]
