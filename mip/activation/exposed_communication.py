"""Exposed communication of a stage under a plan: seconds that collectives last longer than the work beside them.

Part of the cost model (`memo.mip.activation.cost`); `memo.mip.activation.network_load` says which collective runs beside
which layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memo.mip.activation.network_load import pass_loads, sync_load
from memo.mip.inputs.pipeline_schedules import Kind

if TYPE_CHECKING:
    from memo.mip.activation.plan import ActivationProblem, LayerPlan
    from memo.mip.inputs.profile import LayerProfile

__all__ = ["ExposedCommunication", "exposed_sync_s", "work_s"]


@dataclasses.dataclass(slots=True, kw_only=True)
class ExposedCommunication:
    """Exposed gathers and reductions of one microbatch, in seconds."""

    of_turns: dict[tuple[int, Kind], float]
    """By chunk and kind of pass."""
    of_layers: dict[tuple[int, Kind], float]
    """By layer of the stage that runs meanwhile, and kind."""

    @classmethod
    def of(
        cls, problem: ActivationProblem, stage: int, *, layers: Sequence[LayerProfile], plans: Sequence[LayerPlan]
    ) -> ExposedCommunication:
        """Computes what is exposed of these layers of a stage."""
        found, first = cls(of_turns={}, of_layers={}), 0
        for chunk, loads in enumerate(pass_loads(problem, stage)):
            for kind, load in loads.items():
                own = range(first, first + len(load.while_running))
                exposed = load.exposed_s([work_s(layers[number], plans[number], kind) for number in own])
                found.of_layers.update({(number, kind): seconds for number, seconds in zip(own, exposed, strict=True)})
                found.of_turns[chunk, kind] = load.before_s + sum(exposed) + load.after_s
            first = own.stop
        return found


def work_s(layer: LayerProfile, plan: LayerPlan, kind: Kind) -> float:
    """Seconds of a layer's work in one pass, recompute included."""
    if kind is Kind.FORWARD:
        return layer.forward_s
    share = 1.0 if kind is Kind.BACKWARD else 0.5
    return share * layer.backward_s + (0.0 if kind is Kind.WEIGHT else plan.recompute_s(layer))


def exposed_sync_s(
    problem: ActivationProblem,
    stage: int,
    *,
    layers: Sequence[LayerProfile],
    plans: Sequence[LayerPlan],
    waits: Sequence[Mapping[tuple[int, Kind], float]],
) -> float:
    """Seconds after a stage's last pass until the gradients that are reduced once a step are.

    Args:
        problem: with the stage.
        stage: its number.
        layers: of the stage.
        plans: of these layers.
        waits: seconds by layer and kind of pass for which compute waits while the layer runs, by cause.
    """
    load = sync_load(problem, stage)
    if load is None:
        return 0.0
    clock_s = reduced_s = 0.0
    for step in load.steps:
        clock_s += step.end_s
        if step.layer is not None:
            clock_s += work_s(layers[step.layer], plans[step.layer], load.kind)
            clock_s += sum(of_layers.get((step.layer, load.kind), 0.0) for of_layers in waits)
        reduced_s = max(reduced_s, clock_s) + step.sync_s
    return max(reduced_s - clock_s, 0.0)
