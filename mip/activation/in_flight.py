"""How many microbatches one rank holds of each of its chunks, moment by moment, read off what it does in a step.

Owns the counting alone; what a microbatch's layers hold is the planner's. Of a chunk's call these are the states:

    forward ──▶ waiting ──▶ backward, gone                        its kept bytes stay on the device
    forward ──▶ waiting ──▶ first half ──▶ between ──▶ second half, gone      between: what is not moved stays, also what
                                                                             was computed again

Two things stand whole beside that: the last layer of the forward that ran last, until another forward begins; and what
backward comes to next, which is read ahead while the last layer of the turn before it runs, and then waits through the
forwards in between. Moments in which nothing is held that another one does not hold too are left out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

from memo.mip.inputs.pipeline_schedules import Kind, Turn

__all__ = ["Moment", "Succession", "in_flight_within", "moments_of", "peak_in_flight", "successions_of"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A chunk's layers are running, one after the other, and the rank holds other calls besides."""

    chunk: int
    kind: Kind
    """BACKWARD also stands for a forward, in which layers hold the same; a forward is one where `ahead` waits through it."""
    waiting: tuple[int, ...]
    """By chunk: other microbatches between forward and backward."""
    between: tuple[int, ...]
    """By chunk: other microbatches between the two halves of backward."""
    standing: int | None = None
    """The chunk whose last layer stands whole: one of those that wait."""
    ahead: tuple[int, bool] | None = None
    """The chunk of which a layer is read ahead, and whether that is its first, for the second half of a backward; else its
    last. One of those that wait, or are between."""

    @property
    def held(self) -> tuple[int, ...]:
        """By chunk: microbatches, the running one included."""
        return tuple(
            waiting + between + (chunk == self.chunk)
            for chunk, (waiting, between) in enumerate(zip(self.waiting, self.between, strict=True))
        )


@functools.lru_cache(maxsize=256)
def moments_of(turns: tuple[Turn, ...], chunks: int) -> tuple[Moment, ...]:
    """Those that can be the fullest, in the order in which they come."""
    waiting, between = [0] * chunks, [0] * chunks
    latest: tuple[int, int] | None = None  # whose last layer stands whole
    found: dict[Moment, None] = {}
    aheads = _aheads(turns)
    for at, turn in enumerate(turns):
        if turn.kind in (Kind.BACKWARD, Kind.INPUT):
            waiting[turn.chunk] -= 1
            latest = None if latest == turn.call else latest
        elif turn.kind is Kind.WEIGHT:
            between[turn.chunk] -= 1
        ahead = aheads[at]
        alike = turn.kind is Kind.FORWARD and ahead is None
        found[
            Moment(
                chunk=turn.chunk,
                kind=Kind.BACKWARD if alike else turn.kind,
                waiting=tuple(waiting),
                between=tuple(between),
                standing=None if latest is None else latest[0],
                ahead=None if ahead is None else (ahead.chunk, ahead.kind is Kind.WEIGHT),
            )
        ] = None
        if turn.kind is Kind.FORWARD:
            waiting[turn.chunk] += 1
            latest = turn.call
        elif turn.kind is Kind.INPUT:
            between[turn.chunk] += 1
    return tuple(moment for moment in found if not any(_covers(other, moment) for other in found if other != moment))


def peak_in_flight(turns: tuple[Turn, ...], chunks: int) -> tuple[tuple[int, ...], ...]:
    """Microbatches by chunk that are held at one time, wherever no other time has as many of each."""
    all_held = dict.fromkeys(moment.held for moment in moments_of(turns, chunks))
    return tuple(one for one in all_held if not any(_at_least(other, one) for other in all_held if other != one))


def in_flight_within(turns: tuple[Turn, ...], than: tuple[Turn, ...], *, chunks: int) -> bool:
    """Whether whatever is held at a time in one order is also held, by itself or with more, at some time in the other."""
    others = moments_of(than, chunks)
    return all(any(other == one or _covers(other, one) for other in others) for one in moments_of(turns, chunks))


def _covers(other: Moment, one: Moment) -> bool:
    alike = (other.chunk, other.kind, other.standing, other.ahead) == (one.chunk, one.kind, one.standing, one.ahead)
    return alike and _at_least(other.waiting + other.between, one.waiting + one.between)


def _at_least(these: Iterable[int], those: Iterable[int]) -> bool:
    return all(this >= that for this, that in zip(these, those, strict=True))


def _aheads(turns: Sequence[Turn]) -> list[Turn | None]:
    """For each turn the backward that is read ahead in it, or waits through it: the next one, if what it wants went before.

    A second half that follows its first one finds its first layer where that left it.
    """
    gone_at = _gone_at(turns)
    found: list[Turn | None] = [None] * len(turns)
    latest: int | None = None  # backward, in which is read ahead
    for at, turn in enumerate(turns):
        if turn.kind is Kind.FORWARD:
            continue
        if latest is not None:
            stays = turn.kind is Kind.WEIGHT and turn.call == turns[latest].call
            if stays or gone_at[turn.call] < latest:
                found[latest + stays : at] = [turn] * (at - latest - stays)
        latest = at
    return found


def _gone_at(turns: Sequence[Turn]) -> dict[tuple[int, int], int]:
    """When each call's last layer goes: as the next forward begins."""
    forwards = [at for at, turn in enumerate(turns) if turn.kind is Kind.FORWARD]
    return {turns[at].call: following for at, following in zip(forwards, [*forwards[1:], len(turns)], strict=True)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """One turn's first copies have the other's first or last layer to hide behind."""

    turn: tuple[int, Kind]
    """Chunk and kind of the turn whose layer is copied: a forward's last one out, a backward's first one in."""
    beside: tuple[int, Kind] | None
    """The forward that follows, in its first layer; or the backward before, in its last. None: nothing runs beside it."""
    times: int
    """In a step."""


@functools.lru_cache(maxsize=256)
def successions_of(turns: tuple[Turn, ...]) -> tuple[Succession, ...]:
    """Of all turns: what is copied out begins as the next forward does, unless its own backward comes first; what is copied
    in begins in the backward before, unless it never went or is still there."""
    gone_at = _gone_at(turns)
    counts: collections.Counter[tuple[tuple[int, Kind], tuple[int, Kind] | None]] = collections.Counter()
    latest: int | None = None  # backward
    for at, turn in enumerate(turns):
        if turn.kind is Kind.FORWARD:
            following = gone_at[turn.call]
            begun = {other.call for other in turns[at:following] if other.kind is not Kind.FORWARD}
            if following < len(turns) and turn.call not in begun:
                counts[_key(turn), _key(turns[following])] += 1
            continue
        if turn.kind is Kind.WEIGHT:
            away = latest is None or turns[latest].call != turn.call
            in_time = True
        else:
            away, in_time = gone_at[turn.call] < at, latest is not None and gone_at[turn.call] < latest
        if away:
            counts[_key(turn), _key(turns[latest]) if latest is not None and in_time else None] += 1
        latest = at
    return tuple(Succession(turn=turn, beside=beside, times=times) for (turn, beside), times in counts.items())


def _key(turn: Turn) -> tuple[int, Kind]:
    return turn.chunk, turn.kind
