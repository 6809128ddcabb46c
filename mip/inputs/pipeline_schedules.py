"""Pipeline schedules: the order in which each rank runs forwards and backwards, as in torch's schedules.

Owns the assignment of stages to ranks and each rank's sequence of turns; tests compare them with torch's. Knows no
layers, bytes or times. A rank's stages are its chunks, counted in the order of the layers.

    interleaved-1f1b, 2 ranks, 4 microbatches:  rank 0   0F0 0F1 1F0 1F1 0F2  1B0 0F3 ...       chunk, kind, microbatch
    zbv, 2 ranks, 4 microbatches:               rank 1   0F0  1F0 0F1  1F1 1I0 1W0 ...

Where backward is split, INPUT computes the gradients that the previous stage waits for, and WEIGHT the rest when there
is time. No stage waits for the pipeline's first one, whose backward is whole.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Iterator


class PipelineSchedule(enum.StrEnum):
    """The order of forwards and backwards in a pipeline."""

    GPIPE = "gpipe"  # Huang et al. 2019
    ONE_F_ONE_B = "1f1b"  # Narayanan et al. 2019, PipeDream
    INTERLEAVED = "interleaved-1f1b"  # Narayanan et al. 2021
    ZERO_BUBBLE = "interleaved-zero-bubble"  # Qi et al. 2023
    ZERO_BUBBLE_V = "zbv"  # the same, stages in a V

    @property
    def default_chunks(self) -> int:
        """Number of chunks of each rank, where none is asked for."""
        return 1 if self in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B) else 2

    @property
    def splits_backward(self) -> bool:
        """True where gradients of inputs and of weights are turns of their own."""
        return self in (PipelineSchedule.ZERO_BUBBLE, PipelineSchedule.ZERO_BUBBLE_V)

    def reason_not_chunks(self, chunks: int) -> str | None:
        """Reason why ranks cannot have so many chunks, as the end of a sentence about the number; None if they can."""
        if self in (PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE):
            return None if chunks >= 2 else f"is too few for {self}; at least 2"
        if chunks == self.default_chunks:
            return None
        return f"is not possible with {self}, which gives a rank {self.default_chunks}"

    def stages_of(self, rank: int, ranks: int, *, chunks: int | None = None) -> list[int]:
        """Lists the stages of one rank, in the order of the layers."""
        if self is PipelineSchedule.ZERO_BUBBLE_V:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + chunk * ranks for chunk in range(chunks or self.default_chunks)]

    def reason_unsupported(self, microbatches: int, ranks: int) -> str | None:
        """Reason why the schedule cannot run, as the end of a sentence about the microbatches; None if it can."""
        if self is PipelineSchedule.GPIPE or ranks == 1:
            return None
        least = 2 * ranks if self is PipelineSchedule.ZERO_BUBBLE_V else ranks
        if microbatches < least:
            return f"is too few for {self} on {ranks} pipeline ranks; at least {least}"
        if self.default_chunks > 1 and microbatches % max(1, microbatches // ranks):
            return f"does not divide into rounds of {ranks}, the pipeline ranks; use a multiple of {ranks}"
        return None


class Pass(enum.StrEnum):
    """Pass of a turn over a chunk's layers."""

    FORWARD = "F"
    BACKWARD = "B"
    """A whole backward."""
    INPUT = "I"
    """The first half of a split backward, from the last layer on: gradients of inputs."""
    WEIGHT = "W"
    """The second half, from the first layer on: gradients of weights."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One pass of one chunk for one microbatch."""

    chunk: int
    kind: Pass
    microbatch: int

    @property
    def call(self) -> tuple[int, int]:
        """(chunk, microbatch), which identifies the activations held from the forward on."""
        return self.chunk, self.microbatch


@functools.cache
def _turn(chunk: int, kind: Pass, microbatch: int) -> Turn:
    """The one turn of these values: orders of all ranks and schedules share them."""
    return Turn(chunk=chunk, kind=kind, microbatch=microbatch)


class _Order(tuple[Turn, ...]):
    """An order of turns that is hashed once; it is the key of what is known about it."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@functools.lru_cache(maxsize=1024)
def rank_turns(
    schedule: PipelineSchedule, *, ranks: int, rank: int, microbatches: int, chunks: int | None = None
) -> tuple[Turn, ...]:
    """Turns of one rank in a step, in order; `chunks` is a number that the schedule allows, by default its own."""
    match schedule:
        case PipelineSchedule.GPIPE:
            return one_chunk_turns(microbatches, microbatches)
        case PipelineSchedule.ONE_F_ONE_B:
            return one_chunk_turns(microbatches, min(microbatches, ranks - rank))
        case PipelineSchedule.ZERO_BUBBLE_V:
            turns: Iterable[Turn] = (
                turn for turn in _in_a_v(ranks, rank, microbatches) if turn.microbatch < microbatches
            )
        case _:
            split = schedule is PipelineSchedule.ZERO_BUBBLE
            turns = _interleaved(ranks, rank, microbatches, chunks or schedule.default_chunks, split=split)
    if rank == 0:
        return _Order(turn for one in turns if (turn := _undivided(one) if one.chunk == 0 else one))
    return _Order(turns)


def _undivided(turn: Turn) -> Turn | None:
    """Turn of the pipeline's first stage: no first half of backward, and the second half is all of it."""
    if turn.kind is Pass.INPUT:
        return None
    return _turn(0, Pass.BACKWARD, turn.microbatch) if turn.kind is Pass.WEIGHT else turn


@functools.lru_cache(maxsize=1024)
def one_chunk_turns(microbatches: int, ahead: int) -> tuple[Turn, ...]:
    """Turns of a rank with one chunk that holds up to `ahead` microbatches: a backward follows that many forwards."""
    forwards = [_turn(0, Pass.FORWARD, which) for which in range(microbatches)]
    backwards = [_turn(0, Pass.BACKWARD, which) for which in range(microbatches)]
    steady = (turn for pair in zip(backwards, forwards[ahead:], strict=False) for turn in pair)
    return _Order((*forwards[:ahead], *steady, *backwards[microbatches - ahead :]))


def _interleaved(ranks: int, rank: int, microbatches: int, chunks: int, *, split: bool) -> Iterator[Turn]:
    """Chunks alternate, a round of microbatches each; later ranks run fewer forwards ahead.

    Where backward is split, the second half is delayed by as many backwards as the rank's number.
    """
    total = chunks * microbatches
    a_round = microbatches // max(1, microbatches // ranks)
    ahead = min((chunks - 1) * a_round + (1 if split else 2) * (ranks - 1 - rank), total)
    order = [(step // a_round % chunks, step // (a_round * chunks) * a_round + step % a_round) for step in range(total)]
    forwards = [_turn(chunk, Pass.FORWARD, which) for chunk, which in order]
    first_half = Pass.INPUT if split else Pass.BACKWARD
    backwards = [_turn(chunks - 1 - chunk, first_half, which) for chunk, which in order]
    weights = [_turn(turn.chunk, Pass.WEIGHT, turn.microbatch) for turn in backwards] if split else []
    yield from forwards[:ahead]
    for step, backward in enumerate(backwards):
        yield from forwards[ahead + step : ahead + step + 1]
        yield backward
        if step >= rank:
            yield from weights[step - rank : step - rank + 1]
    yield from weights[max(total - rank, 0) :]


def _in_a_v(ranks: int, rank: int, microbatches: int) -> Iterator[Turn]:
    """The first chunk's stages go down the ranks, the second's come back up; may yield microbatches beyond the last."""
    wanted = max(2 * ranks - 1, microbatches)
    done = {(chunk, kind): 0 for chunk in (0, 1) for kind in Pass}

    def run(chunk: int, *kinds: Pass) -> Iterator[Turn]:
        for kind in kinds:
            yield _turn(chunk, kind, done[chunk, kind])
            done[chunk, kind] += 1

    both = (Pass.INPUT, Pass.WEIGHT)
    for _ in range(2 * (ranks - rank) - 1):
        yield from run(0, Pass.FORWARD)
    for _ in range(rank):
        yield from run(1, Pass.FORWARD)
        yield from run(0, Pass.FORWARD)
    for _ in range(ranks - rank):
        yield from run(1, Pass.FORWARD, *both)
    while done[1, Pass.FORWARD] < done[0, Pass.FORWARD] or done[0, Pass.FORWARD] < wanted:
        if done[0, Pass.FORWARD] < wanted:
            yield from run(0, Pass.FORWARD)
        yield from run(0, *both)
        yield from run(1, Pass.FORWARD, *both)
    for _ in range(rank):
        yield from run(0, Pass.INPUT)
        yield from run(1, Pass.INPUT)
    for _ in range(ranks - rank):
        yield from run(0, *both)
    for chunk in (1, 0):
        while done[chunk, Pass.WEIGHT] < done[chunk, Pass.INPUT]:
            yield from run(chunk, Pass.WEIGHT)
