"""What a pipeline's schedule has one rank do in every step, known before the first one.

Read from the order that torch's schedules show. Owns no schedule, and needs none of torch's pipelining to be imported.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memo.mip.activation import StageTurns, peak_in_flight
from memo.mip.inputs import Kind, Turn

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PipelineOrder"]

_KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUT,
    "BACKWARD_WEIGHT": Kind.WEIGHT,
}
# What only moves parameters or gradients.
_NOTHING_SAVED = frozenset({"REDUCE_GRAD", "UNSHARD", "RESHARD"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """Of one rank, whose layers may be of more than one stage."""

    stages: int
    """Of the whole pipeline; `own` are this rank's."""
    own: tuple[int, ...]
    held: int
    """The most microbatches that one of the layers has in flight."""
    weight: int
    """Calls of layers that the rank holds activations of at a time, at most: its need of what a node's ranks share."""
    backward: tuple[tuple[int, int], ...]
    """(layer, how often it was called before in the step), in the order in which backward comes to them."""
    turns: StageTurns | None = None
    """Stage by stage, of a rank that has several, one behind the other in the order of its layers."""

    @classmethod
    def of(cls, schedule: Any, layers: Sequence[nn.Module]) -> PipelineOrder | None:
        """Of one of torch's schedules, for the `layers` of this rank; None for one that does not show its order."""
        stages = {stage.stage_index: stage for stage in getattr(schedule, "_stages", None) or [schedule._stage]}
        order = getattr(schedule, "pipeline_order", None)
        rank = next(iter(stages.values())).group_rank
        if not order or rank not in order:
            return None
        inside = {index: _positions(layers, stage.submod) for index, stage in stages.items()}
        turns = tuple(_turns(order[rank], tuple(inside)))
        sizes = [len(own) for own in inside.values()]
        held = peak_in_flight(turns, len(inside))
        consecutive = [position for own in inside.values() for position in own] == list(range(len(layers)))
        return cls(
            stages=next(iter(stages.values())).num_stages,
            own=tuple(inside),
            held=max(max(counts) for counts in held),
            weight=max(sum(count * size for count, size in zip(counts, sizes, strict=True)) for counts in held),
            backward=tuple(call for call, _ in itertools.groupby(_backward(turns, list(inside.values())))),
            turns=StageTurns(layers=tuple(sizes), turns=turns)
            if consecutive and all(sizes) and len(sizes) > 1
            else None,
        )


def _positions(layers: Sequence[nn.Module], stage: nn.Module) -> list[int]:
    within = set(stage.modules())
    return [position for position, layer in enumerate(layers) if layer in within]


def _turns(order: Sequence[Any], own: Sequence[int]) -> Iterator[Turn]:
    """What of an order concerns activations.

    The first stage's input wants no gradient, and its whole backward is the second half. Forwards of a stage run in the
    order of the microbatches; the numbers that torch's 1F1B shows with the last stage's are one too high.
    """
    forwards: collections.Counter[int] = collections.Counter()
    for action in order:
        if action is None or action.computation_type.name in _NOTHING_SAVED:
            continue
        stage, microbatch = action.stage_index, action.microbatch_index
        if action.computation_type.name not in _KINDS:
            raise AssertionError(f"no rule for {action.computation_type.name} of a pipeline's order")
        kind = _KINDS[action.computation_type.name]
        if kind is Kind.FORWARD:
            microbatch, forwards[stage] = forwards[stage], forwards[stage] + 1
        elif stage == 0:
            if kind is Kind.INPUT:
                continue
            kind = Kind.BACKWARD
        yield Turn(chunk=own.index(stage), kind=kind, microbatch=microbatch)


def _backward(turns: Sequence[Turn], inside: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Of each microbatch the layers in reverse; the second half of a split backward from the first layer on."""
    for turn in turns:
        if turn.kind is not Kind.FORWARD:
            layers = inside[turn.chunk] if turn.kind is Kind.WEIGHT else reversed(inside[turn.chunk])
            yield from ((layer, turn.microbatch) for layer in layers)
