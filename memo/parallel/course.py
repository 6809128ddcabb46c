"""What a pipeline's schedule has one rank do in every step, known before the first one.

Read from the order that torch's schedules show. Owns no schedule, and needs none of torch's pipelining to be imported.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Course"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
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

    @classmethod
    def of(cls, schedule: Any, layers: Sequence[nn.Module]) -> Course | None:
        """Of one of torch's schedules, for the `layers` of this rank; None for one that does not show its order."""
        from memo.parallel.pipeline import in_flight

        stages = {stage.stage_index: stage for stage in getattr(schedule, "_stages", None) or [schedule._stage]}
        order = getattr(schedule, "pipeline_order", None)
        rank = next(iter(stages.values())).group_rank
        if not order or rank not in order:
            return None
        inside = {index: _positions(layers, stage.submod) for index, stage in stages.items()}
        held = in_flight({rank: order[rank]})
        return cls(
            stages=next(iter(stages.values())).num_stages,
            own=tuple(stages),
            held=max(held.values()),
            weight=sum(held[index] * len(own) for index, own in inside.items()),
            backward=tuple(call for call, _ in itertools.groupby(_backward(order[rank], inside))),
        )


def _positions(layers: Sequence[nn.Module], stage: nn.Module) -> list[int]:
    within = set(stage.modules())
    return [position for position, layer in enumerate(layers) if layer in within]


def _backward(order: Sequence[Any], inside: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Of each microbatch the layers in reverse.

    A split backward makes the inputs' gradients in reverse, then the weights' from the first layer on; the first stage's
    input wants none, and its whole backward is the second half. Forwards of a stage run in the order of the microbatches,
    so a layer's nth call is of the nth; the numbers that torch's 1F1B shows with the last stage's are one too high.
    """
    for action in order:
        if action is None:
            continue
        stage, kind = action.stage_index, action.computation_type.name
        layers = inside.get(stage, ())
        if (
            kind == "FULL_BACKWARD"
            or (kind == "BACKWARD_INPUT" and stage > 0)
            or (kind == "BACKWARD_WEIGHT" and not stage)
        ):
            yield from ((layer, action.microbatch_index) for layer in reversed(layers))
        elif kind == "BACKWARD_WEIGHT":
            yield from ((layer, action.microbatch_index) for layer in layers)
