"""Microbatches in flight: how many one rank holds of each of its chunks at each moment, from its order of turns.

Owns the counting alone. A call is one chunk's forward and backward of one microbatch; its states are:

    forward ──▶ waiting ──▶ backward, gone                                  waiting: kept bytes stay on the device
    forward ──▶ waiting ──▶ first half ──▶ between ──▶ second half, gone    between: all but the moved bytes stay,
                                                                            also recomputed ones

Note [Microbatches in flight]. Each has its own kept, host and disk bytes: of a stage p of P with one chunk and M
microbatches min(M, P - p) under 1F1B, all under GPipe; of several chunks as many as the order of turns has, moment by
moment. Two layers have not left, or are back: the last layer of the latest forward, until another forward begins, and
it leaves beside the first layer of that; and the first layer of the next backward, which is read ahead while the last
layer of the turn before it runs, and then waits through the forwards in between. A stage's last layer does not move,
but is computed again if it has left.

Moments that hold nothing beyond another one are left out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

from memo.mip.inputs.pipeline_schedules import Pass, Turn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePoint:
    """A turn of one chunk, with the other calls that the rank holds meanwhile."""

    chunk: int
    kind: Pass
    waiting: tuple[int, ...]
    """For each chunk the number of other microbatches between forward and backward."""
    between: tuple[int, ...]
    """For each chunk the number of other microbatches between the two halves of backward."""
    whole_chunk: int | None = None
    """The chunk whose last layer has not left; one of those that wait."""
    ahead: tuple[int, bool] | None = None
    """The chunk of which a layer is read ahead, one of those that wait or are between; and whether that is its first
    layer, for the second half of a backward, instead of its last."""

    @property
    def held(self) -> tuple[int, ...]:
        """For each chunk the number of microbatches, the running one included."""
        return tuple(
            waiting + between + (chunk == self.chunk)
            for chunk, (waiting, between) in enumerate(zip(self.waiting, self.between, strict=True))
        )


@functools.lru_cache(maxsize=1024)
def moments_of(turns: tuple[Turn, ...], chunks: int) -> tuple[SchedulePoint, ...]:
    """Moments that may hold most, in order of time.

    Args:
        turns: of one rank in one step.
        chunks: number of the rank's chunks.
    """
    waiting, between = [0] * chunks, [0] * chunks
    latest: tuple[int, int] | None = None  # whose last layer is whole
    found: dict[SchedulePoint, None] = {}
    read_ahead = _read_ahead(turns)
    for at, turn in enumerate(turns):
        if turn.kind in (Pass.BACKWARD, Pass.INPUT):
            waiting[turn.chunk] -= 1
            latest = None if latest == turn.call else latest
        elif turn.kind is Pass.WEIGHT:
            between[turn.chunk] -= 1
        ahead = read_ahead[at]
        found[
            SchedulePoint(
                chunk=turn.chunk,
                kind=turn.kind,
                waiting=tuple(waiting),
                between=tuple(between),
                whole_chunk=None if latest is None else latest[0],
                ahead=None if ahead is None else (ahead.chunk, ahead.kind is Pass.WEIGHT),
            )
        ] = None
        if turn.kind is Pass.FORWARD:
            waiting[turn.chunk] += 1
            latest = turn.call
        elif turn.kind is Pass.INPUT:
            between[turn.chunk] += 1
    alike: collections.defaultdict[tuple[object, ...], list[SchedulePoint]] = collections.defaultdict(list)
    for moment in found:
        alike[_places(moment)].append(moment)
    return tuple(
        moment
        for moment in found
        if not any(_covers(other, moment) for other in alike[_places(moment)] if other is not moment)
    )


@functools.lru_cache(maxsize=1024)
def peak_in_flight(turns: tuple[Turn, ...], chunks: int) -> tuple[tuple[int, ...], ...]:
    """Maximal numbers of microbatches in flight, by chunk; several where no moment has most of every chunk."""
    all_held = dict.fromkeys(moment.held for moment in moments_of(turns, chunks))
    return tuple(one for one in all_held if not any(_at_least(other, one) for other in all_held if other != one))


@functools.lru_cache(maxsize=1024)
def split_chunks(turns: tuple[Turn, ...]) -> frozenset[int]:
    """The chunks whose backward is split into two halves."""
    return frozenset(turn.chunk for turn in turns if turn.kind is Pass.WEIGHT)


def in_flight_within(turns: tuple[Turn, ...], bound: tuple[Turn, ...], *, chunks: int) -> bool:
    """Whether one order of turns never holds more than another: each of its moments is covered by one of `bound`'s."""
    others = moments_of(bound, chunks)
    return all(any(other == one or _covers(other, one) for other in others) for one in moments_of(turns, chunks))


def _places(moment: SchedulePoint) -> tuple[object, ...]:
    """The pass and the chunks whose layers are whole; moments with equal ones differ in the calls that are held."""
    return moment.chunk, moment.kind, moment.whole_chunk, moment.ahead


def _covers(other: SchedulePoint, one: SchedulePoint) -> bool:
    return _places(other) == _places(one) and _at_least(other.waiting + other.between, one.waiting + one.between)


def _at_least(these: Iterable[int], those: Iterable[int]) -> bool:
    return all(this >= that for this, that in zip(these, those, strict=True))


def _read_ahead(turns: Sequence[Turn]) -> list[Turn | None]:
    """For each turn the backward whose first layer is read ahead in it or waits through it, if that layer had left.

    Between the halves of a backward it has, but for a second half that follows its first half directly.
    """
    leaves_at = _leaves_at(turns)
    found: list[Turn | None] = [None] * len(turns)
    latest: int | None = None  # the latest backward, during which the layer is read ahead
    for at, turn in enumerate(turns):
        if turn.kind is Pass.FORWARD:
            continue
        if latest is not None:
            stays = turn.kind is Pass.WEIGHT and turn.call == turns[latest].call
            if turn.kind is Pass.WEIGHT or leaves_at[turn.call] < latest:
                found[latest + stays : at] = [turn] * (at - latest - stays)
        latest = at
    return found


def _leaves_at(turns: Sequence[Turn]) -> dict[tuple[int, int], int]:
    """Index of the turn at which each call's last layer leaves: the next forward."""
    forwards = [at for at, turn in enumerate(turns) if turn.kind is Pass.FORWARD]
    return {turns[at].call: following for at, following in zip(forwards, [*forwards[1:], len(turns)], strict=True)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnCopy:
    """A copy between turns, and the turn whose first or last layer hides it."""

    turn: tuple[int, Pass]
    """(chunk, kind) of the turn whose layer is copied: a forward's last layer out, a backward's first layer in."""
    hidden_by: tuple[int, Pass] | None
    """The next forward (its first layer), or the previous backward (its last); None if nothing hides the copy."""
    times: int
    """Number of such copies in a step."""


@functools.lru_cache(maxsize=1024)
def copies_between_turns(turns: tuple[Turn, ...]) -> tuple[TurnCopy, ...]:
    """Counts the copies between turns.

    A copy out begins with the next forward, unless the layer's own backward comes first. A copy in begins during the
    previous backward, unless the layer never left or is still there.
    """
    leaves_at = _leaves_at(turns)
    counts: collections.Counter[tuple[tuple[int, Pass], tuple[int, Pass] | None]] = collections.Counter()
    latest: int | None = None  # backward
    for at, turn in enumerate(turns):
        if turn.kind is Pass.FORWARD:
            following = leaves_at[turn.call]
            begun = {other.call for other in turns[at:following] if other.kind is not Pass.FORWARD}
            if following < len(turns) and turn.call not in begun:
                counts[_key(turn), _key(turns[following])] += 1
            continue
        if turn.kind is Pass.WEIGHT:
            away = latest is None or turns[latest].call != turn.call
            in_time = True
        else:
            away, in_time = leaves_at[turn.call] < at, latest is not None and leaves_at[turn.call] < latest
        if away:
            counts[_key(turn), _key(turns[latest]) if latest is not None and in_time else None] += 1
        latest = at
    return tuple(TurnCopy(turn=turn, hidden_by=hidden_by, times=times) for (turn, hidden_by), times in counts.items())


def _key(turn: Turn) -> tuple[int, Pass]:
    return turn.chunk, turn.kind
