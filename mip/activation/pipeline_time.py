"""Time of a pipeline's step, given the time of one microbatch on each stage.

Owns the dependencies alone. The simulator plays the same with every copy, and shares no code with this.

Note [Stages wait]. A forward waits for the previous stage, a backward for the next one, the second half of a split
backward only for its own rank. A message arrives after the time of a send, which begins when the one before it on this
way has arrived. Stages may have different numbers of layers, and each its own machine; those that stand on other nodes
than the ones before begin a new node. The optimizer runs when all stages have their gradients, as a clip of their norm
needs, and as long as the slowest one's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from memo.mip.inputs.pipeline_schedules import Pass

if TYPE_CHECKING:
    from memo.mip.activation.plan import Pipeline

SendSeconds = Callable[[int, int], float]
"""(giving stage, taking stage) -> seconds of a message."""


class StageTimes(Protocol):
    """Times of one stage, predicted or measured."""

    @property
    def sync_s(self) -> float:
        """Seconds a step after the last backward until the stage has its gradients."""

    def turn_s(self, chunk: int, kind: Pass) -> float:
        """Seconds of one turn."""


def microbatches_s(
    pipeline: Pipeline, stages: Sequence[StageTimes], *, send_s: SendSeconds = lambda giver, taker: 0.0
) -> float:
    """Seconds from the start of a step until every stage has its last gradients.

    Args:
        pipeline: stages and microbatches.
        stages: times of each stage.
        send_s: seconds of a message from one stage to another.
    """
    ahead = max(pipeline.stages, pipeline.in_flight(0))
    shown = 4 * ahead  # from there on each further one takes as long as the one before it
    if pipeline.chunks > 1 or pipeline.microbatches <= shown:
        return _in_turns(pipeline, stages, send_s)
    seconds, before_s = (
        _in_turns(dataclasses.replace(pipeline, microbatches=count), stages, send_s) for count in (shown, shown - ahead)
    )
    return seconds + (pipeline.microbatches - shown) * (seconds - before_s) / ahead


def _in_turns(pipeline: Pipeline, stages: Sequence[StageTimes], send_s: SendSeconds) -> float:
    count, last = len(stages), pipeline.chunks * len(stages) - 1
    clock, at = [0.0] * count, [0] * count
    orders = [pipeline.turns(stage) for stage in range(count)]
    places = [pipeline.chunk_positions(stage) for stage in range(count)]
    rank_of = {place: rank for rank, own in enumerate(places) for place in own}
    turns_s = [
        {(chunk, kind): stage.turn_s(chunk, kind) for chunk in range(pipeline.chunks) for kind in Pass}
        for stage in stages
    ]
    # By place, forward or the backward others wait for, and microbatch: when what it sends has arrived.
    ready: dict[tuple[int, bool, int], float] = {}
    free: dict[tuple[int, int], float] = {}  # by giving and taking stage: when their link is
    sends_s: dict[tuple[int, int], float] = {}
    while any(done < len(order) for done, order in zip(at, orders, strict=True)):
        for number, (order, own, own_s) in enumerate(zip(orders, places, turns_s, strict=True)):
            now_s, done = clock[number], at[number]
            while done < len(order):
                turn = order[done]
                kind = turn.kind
                place, forward = own[turn.chunk], kind is Pass.FORWARD
                giver = place - 1 if forward else place + 1
                if kind is not Pass.WEIGHT and 0 <= giver <= last and pipeline.own is None:
                    given = ready.get((giver, forward, turn.microbatch))
                    if given is None:
                        break
                    now_s = max(now_s, given)
                now_s += own_s[turn.chunk, kind]
                if kind is not Pass.WEIGHT:
                    taker, arrived_s = rank_of.get(place + 1 if forward else place - 1, number), now_s
                    if taker != number:
                        link = number, taker
                        if link not in sends_s:
                            sends_s[link] = send_s(number, taker)
                        arrived_s = free[link] = max(arrived_s, free.get(link, 0.0)) + sends_s[link]
                    ready[place, forward, turn.microbatch] = arrived_s
                done += 1
            clock[number], at[number] = now_s, done
    return _end_s(clock, stages)


def _end_s(clock: Sequence[float], stages: Sequence[StageTimes]) -> float:
    return max(end_s + stage.sync_s for end_s, stage in zip(clock, stages, strict=True))
