"""Order of forwards and backwards on one pipeline rank, known before the first step.

Read from the `pipeline_order` of torch's schedules, without importing torch's pipelining.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memo.mip.activation import StageTurns, peak_in_flight
from memo.mip.inputs import Pass, Turn

if TYPE_CHECKING:
    from torch import nn

_KINDS = {
    "FORWARD": Pass.FORWARD,
    "FULL_BACKWARD": Pass.BACKWARD,
    "BACKWARD_INPUT": Pass.INPUT,
    "BACKWARD_WEIGHT": Pass.WEIGHT,
}
# Actions that save no activations: they move parameters or gradients.
_NOTHING_SAVED = frozenset({"REDUCE_GRAD", "UNSHARD", "RESHARD"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """Pipeline order of one rank, which may have several stages."""

    stages: int
    """Stages of the whole pipeline."""
    own: tuple[int, ...]
    """Stage indices of this rank."""
    held: int
    """Most microbatches that any layer has in flight."""
    weight: int
    """Most layer calls whose activations the rank holds at once; weighs its share of the node's memory."""
    backward: tuple[tuple[int, int], ...]
    """(layer index, microbatch) in the order of backward."""
    turns: StageTurns | None = None
    """Turns of each stage, for a rank with several stages whose layers are in the order of the stages; else None."""

    @classmethod
    def of(cls, schedule: Any, layers: Sequence[nn.Module]) -> PipelineOrder | None:
        """Order of this rank's `layers` under one of torch's schedules; None for one without `pipeline_order`."""
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
    """The actions of an order that save or use activations.

    The first stage's input needs no gradient, so its backward is all in the second half of a split one. Forwards of a
    stage run in the order of microbatches and are counted here: torch's 1F1B numbers those of the last stage from one.
    """
    forwards: collections.Counter[int] = collections.Counter()
    for action in order:
        if action is None or action.computation_type.name in _NOTHING_SAVED:
            continue
        stage, microbatch = action.stage_index, action.microbatch_index
        if action.computation_type.name not in _KINDS:
            raise AssertionError(f"no rule for the pipeline action {action.computation_type.name}")
        kind = _KINDS[action.computation_type.name]
        if kind is Pass.FORWARD:
            microbatch, forwards[stage] = forwards[stage], forwards[stage] + 1
        elif stage == 0:
            if kind is Pass.INPUT:
                continue
            kind = Pass.BACKWARD
        yield Turn(chunk=own.index(stage), kind=kind, microbatch=microbatch)


def _backward(turns: Sequence[Turn], inside: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Layer calls in the order of backward: layers in reverse, but for weight gradients from the first layer on."""
    for turn in turns:
        if turn.kind is not Pass.FORWARD:
            layers = inside[turn.chunk] if turn.kind is Pass.WEIGHT else reversed(inside[turn.chunk])
            yield from ((layer, turn.microbatch) for layer in layers)
