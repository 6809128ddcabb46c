"""What hides each copy of a stage: which layer's work, in which direction, and how often in a step.

Owns the pairing alone, by the rules of `memo.mip.activation.plan`. Layers are counted within the stage. Within a chunk
a layer is copied out beside the next one's forward and in beside its backward, or beside the one before's where the
second half of a split backward runs from the first layer on; at a chunk's ends the order of the turns says what runs beside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memo.mip.activation.in_flight import successions_of
from memo.mip.activation.plan import chunk_layers
from memo.mip.inputs.pipeline_schedules import Kind

if TYPE_CHECKING:
    from memo.mip.activation.plan import ActivationProblem

__all__ = ["Window", "copies_in", "copies_out"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A layer's copy, one way, and the layer beside whose work it has to be over."""

    moving: int
    beside: int | None
    """None: nothing runs beside it."""
    kind: Kind
    """Which work of that layer's."""
    times: float
    """In a microbatch; less than 1 where the order has it so."""
    waits: tuple[int, Kind]
    """The chunk's turn that stalls where it is not over."""

    @property
    def share(self) -> float:
        """Of a layer's backward."""
        return 0.5 if self.kind in (Kind.INPUT, Kind.WEIGHT) else 1.0

    @property
    def recomputes(self) -> bool:
        """The work begins with the layer's recompute."""
        return self.kind in (Kind.BACKWARD, Kind.INPUT)


def copies_out(problem: ActivationProblem, stage: int) -> Iterator[Window]:
    """Of one microbatch."""
    for chunk, layers in enumerate(_numbers(problem, stage)):
        for number in layers[:-1]:
            yield Window(moving=number, beside=number + 1, kind=Kind.FORWARD, times=1.0, waits=(chunk, Kind.FORWARD))
    yield from _at_turns(problem, stage, forward=True)


def copies_in(problem: ActivationProblem, stage: int) -> Iterator[Window]:
    """Of one microbatch."""
    for chunk, layers in enumerate(_numbers(problem, stage)):
        split = problem.pipeline.splits(stage, chunk)
        kind = Kind.INPUT if split else Kind.BACKWARD
        for number in layers[:-1]:
            yield Window(moving=number, beside=number + 1, kind=kind, times=1.0, waits=(chunk, kind))
        for number in layers[1:] if split else ():
            yield Window(moving=number, beside=number - 1, kind=Kind.WEIGHT, times=1.0, waits=(chunk, Kind.WEIGHT))
    yield from _at_turns(problem, stage, forward=False)


def _at_turns(problem: ActivationProblem, stage: int, *, forward: bool) -> Iterator[Window]:
    """Between one turn and another. The stage's last layer does not move, here and above: it has no bytes that do."""
    if problem.pipeline.chunks == 1:
        return
    layers = _numbers(problem, stage)
    for succession in successions_of(problem.pipeline.turns(stage)):
        chunk, kind = succession.turn
        if (kind is Kind.FORWARD) is not forward:
            continue
        beside, besides_kind = None, Kind.FORWARD
        if succession.beside is not None:
            besides_chunk, besides_kind = succession.beside
            at_start = besides_kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)
            beside = layers[besides_chunk][0 if at_start else -1]
        yield Window(
            moving=layers[chunk][0 if kind is Kind.WEIGHT else -1],
            beside=beside,
            kind=besides_kind,
            times=succession.times / problem.pipeline.microbatches,
            waits=(succession.beside or succession.turn) if forward else (chunk, kind),
        )


def _numbers(problem: ActivationProblem, stage: int) -> list[range]:
    """The layers of each chunk, counted within the stage."""
    found, first = [], 0
    for layers in chunk_layers(problem, stage):
        found.append(range(first, first + len(layers)))
        first += len(layers)
    return found
