"""Overlap windows: for each copy of a stage the layer whose work hides it, in which direction, and how often in a step.

Owns the pairing alone. Layers are counted within the stage. At a chunk's ends the order of turns decides.

Note [A copy has a layer's work]. The copy out of layer i starts when layer i+1 starts forward and must end before layer
i+2 (or the head) starts: a window of F(i+1). The copy in starts when layer i+1 starts backward, with its recompute, and
must end before layer i starts: a window of B(i+1) + R(i+1); the recompute of layer i runs between that and its
backward. For the second half of a split backward it is beside layer i-1. Collectives that last longer than the layer's
work are a part of its window. What exceeds the window stalls compute. A stage's last layer never moves: it is needed
next. A problem without overlap has no windows: compute waits for each copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memo.mip.activation.in_flight import copies_between_turns
from memo.mip.inputs.pipeline_schedules import Pass

if TYPE_CHECKING:
    from memo.mip.activation.stage_view import StageView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A layer's copy in one direction, and the layer whose work must hide it."""

    moving: int
    """The layer that is copied."""
    hidden_by: int | None
    """The layer whose work runs meanwhile; None if nothing does."""
    kind: Pass
    """The pass of that layer."""
    times: float
    """Number of such copies per microbatch; a fraction where not every microbatch has one."""
    waits: tuple[int, Pass]
    """(chunk, kind) of the turn that stalls until the copy ends."""
    within: bool = False
    """Whether both layers are of one pass over a chunk."""


def copies_out(stage: StageView) -> Iterator[Window]:
    """Yields the windows of one microbatch's copies out."""
    for chunk, layers in enumerate(stage.numbers):
        for number in layers[:-1]:
            yield _within(number, number + 1 if stage.problem.overlap else None, (chunk, Pass.FORWARD))
    yield from _at_turns(stage, forward=True)


def copies_in(stage: StageView) -> Iterator[Window]:
    """Yields the windows of one microbatch's copies in."""
    for chunk, layers in enumerate(stage.numbers):
        split = stage.splits(chunk)
        kind = Pass.INPUT if split else Pass.BACKWARD
        for number in layers[:-1]:
            yield _within(number, number + 1 if stage.problem.overlap else None, (chunk, kind))
        for number in layers[1:] if split else ():
            yield _within(number, number - 1, (chunk, Pass.WEIGHT))
    yield from _at_turns(stage, forward=False)


def _within(moving: int, hidden_by: int | None, turn: tuple[int, Pass]) -> Window:
    return Window(moving=moving, hidden_by=hidden_by, kind=turn[1], times=1.0, waits=turn, within=True)


def _at_turns(stage: StageView, *, forward: bool) -> Iterator[Window]:
    """Windows between turns. The stage's last layer has no bytes that move, here and above."""
    if stage.pipeline.chunks == 1:
        return
    layers = stage.numbers
    for copy in copies_between_turns(stage.pipeline.turns(stage.number)):
        chunk, kind = copy.turn
        if (kind is Pass.FORWARD) is not forward:
            continue
        hidden_by, hiding_kind = None, Pass.FORWARD
        if copy.hidden_by is not None:
            hiding_chunk, hiding_kind = copy.hidden_by
            at_start = hiding_kind in (Pass.FORWARD, Pass.BACKWARD, Pass.INPUT)
            hidden_by = layers[hiding_chunk][0 if at_start else -1]
        yield Window(
            moving=layers[chunk][0 if kind is Pass.WEIGHT else -1],
            hidden_by=hidden_by,
            kind=hiding_kind,
            times=copy.times / stage.pipeline.microbatches,
            waits=(copy.hidden_by or copy.turn) if forward else (chunk, kind),
        )
