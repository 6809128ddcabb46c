"""Load of the network by one rank of a stage, and its exposed part: seconds that collectives last beyond the work beside.

Owns the pairing of collectives (gathers of sharded weights, reductions of their gradients) with the layers whose work
hides them. Collectives for which compute waits in any case are part of a layer's own time.

Note [Collectives beside layers]. A layer's sharded weights are gathered before each of its passes while the layer
before it in that pass runs, and its gradients, if each microbatch reduces them, are reduced while the layer after it in
backward runs. What takes longer than that layer's work, or has no layer beside it (the gather before a forward, the
reduction after a backward), is exposed. A chunk's last layer stays gathered between forward and backward. Gradients
that are reduced once a step follow one another on the network as the stage's last pass has them ready, behind its work
and recompute and after its gathers; those of another chunk are done by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memo.mip.inputs.pipeline_schedules import Pass

if TYPE_CHECKING:
    from memo.mip.activation.plan import LayerPlan
    from memo.mip.activation.stage_view import StageView
    from memo.mip.inputs.profile import LayerProfile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassLoad:
    """Seconds of collectives in one pass over the layers of a chunk."""

    while_running: tuple[float, ...]
    """Seconds by layer of the chunk, in forward order: hidden by the layer's work as far as that lasts."""
    before_s: float
    """Before the first layer of the pass, where nothing hides it."""
    after_s: float
    """After the last one, likewise."""

    def exposed_s(self, work_s: Sequence[float]) -> list[float]:
        """Seconds by layer that collectives last longer than the work beside them."""
        return [max(load - work, 0.0) for load, work in zip(self.while_running, work_s, strict=True)]


def pass_load(layers: Sequence[LayerProfile], kind: Pass) -> PassLoad:
    """Load of one pass over a chunk's layers, which are given in forward order."""
    ascending = kind in (Pass.FORWARD, Pass.WEIGHT)
    order = list(layers) if ascending else list(reversed(layers))
    gathers = [0.0 if kind is Pass.WEIGHT else layer.gather_s for layer in order]
    reduces = [layer.reduce_s if kind in (Pass.BACKWARD, Pass.WEIGHT) else 0.0 for layer in order]
    loads = [gather + reduce for gather, reduce in zip([*gathers[1:], 0.0], [0.0, *reduces[:-1]], strict=True)]
    return PassLoad(
        while_running=tuple(loads if ascending else reversed(loads)),
        before_s=gathers[0] if kind is Pass.FORWARD else 0.0,
        after_s=reduces[-1],
    )


def pass_loads(stage: StageView) -> list[dict[Pass, PassLoad]]:
    """Loads of a stage's passes, by chunk and kind."""
    found = []
    for chunk, own in enumerate(stage.numbers):
        kinds = (Pass.FORWARD, Pass.INPUT, Pass.WEIGHT) if stage.splits(chunk) else (Pass.FORWARD, Pass.BACKWARD)
        found.append({kind: pass_load(stage.layers[own.start : own.stop], kind) for kind in kinds})
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncStep:
    """One layer or end of a stage's last backward, and the reduction of its gradients that begins when it has run."""

    layer: int | None
    """Number within the stage; None for what is beside the layers."""
    end_s: float = 0.0
    """Seconds of an end's work, or of the exposed reduction after the layers."""
    network_s: float = 0.0
    """Seconds meanwhile in which other collectives, which go first, have the network."""
    sync_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncLoad:
    """Reductions of gradients once a step, one after another, in the order in which a stage's last pass runs."""

    steps: tuple[SyncStep, ...]
    kind: Pass
    """The kind of that pass."""


def sync_load(stage: StageView) -> SyncLoad | None:
    """Once-a-step reductions during the last pass of a stage; None where there are none."""
    chunk, kind = 0, Pass.BACKWARD
    if stage.pipeline.chunks > 1:
        last = stage.pipeline.turns(stage.number)[-1]
        chunk, kind = last.chunk, last.kind
    own, indices = stage.numbers[chunk], stage.chunks[chunk]
    share = 1.0 if kind is Pass.BACKWARD else 0.5
    load = pass_load(stage.layers[own.start : own.stop], kind)
    steps = [
        SyncStep(layer=number, network_s=beside_s, sync_s=stage.layers[number].sync_s)
        for number, beside_s in zip(own, load.while_running, strict=True)
    ]
    if kind is not Pass.WEIGHT:
        steps.reverse()
    steps.append(SyncStep(layer=None, end_s=load.after_s, network_s=load.after_s, sync_s=0.0))
    profile = stage.problem.profile
    head, embedding = profile.head, profile.embedding
    if indices[-1] == len(profile.layers) - 1:
        at = len(steps) if kind is Pass.WEIGHT else 0
        steps.insert(at, SyncStep(layer=None, end_s=share * head.backward_s, sync_s=head.sync_s))
    if indices[0] == 0:
        steps.append(SyncStep(layer=None, end_s=share * embedding.backward_s, sync_s=embedding.sync_s))
    if not any(step.sync_s for step in steps):
        return None
    return SyncLoad(steps=tuple(steps), kind=kind)


@dataclasses.dataclass(slots=True, kw_only=True)
class ExposedCommunication:
    """Exposed gathers and reductions of one microbatch, in seconds."""

    of_turns: dict[tuple[int, Pass], float]
    """Seconds by chunk and kind of pass."""
    of_layers: dict[tuple[int, Pass], float]
    """Seconds by layer of the stage that runs meanwhile, and kind."""

    @classmethod
    def of(cls, stage: StageView, plans: Sequence[LayerPlan]) -> ExposedCommunication:
        """Computes what is exposed of a stage under these plans of its layers."""
        found = cls(of_turns={}, of_layers={})
        for chunk, (own, loads) in enumerate(zip(stage.numbers, pass_loads(stage), strict=True)):
            for kind, load in loads.items():
                exposed = load.exposed_s([work_s(stage.layers[number], plans[number], kind) for number in own])
                found.of_layers.update({(number, kind): seconds for number, seconds in zip(own, exposed, strict=True)})
                found.of_turns[chunk, kind] = load.before_s + sum(exposed) + load.after_s
        return found


def work_s(layer: LayerProfile, plan: LayerPlan, kind: Pass) -> float:
    """Seconds of a layer's work in one pass, recompute and coding included."""
    encode_s, decode_s = plan.coding_s(layer)
    if kind is Pass.FORWARD:
        return layer.forward_s + encode_s
    share = 1.0 if kind is Pass.BACKWARD else 0.5
    return share * layer.backward_s + decode_s + (0.0 if kind is Pass.WEIGHT else plan.recompute_s(layer))


def exposed_sync_s(
    stage: StageView, plans: Sequence[LayerPlan], *, waits: Sequence[Mapping[tuple[int, Pass], float]]
) -> float:
    """Seconds after a stage's last pass until the gradients that are reduced once a step are.

    Args:
        stage: the stage.
        plans: of its layers.
        waits: seconds by layer and kind of pass for which compute waits while the layer runs, by cause.
    """
    load = sync_load(stage)
    if load is None:
        return 0.0
    late_s = 0.0
    for step in load.steps:
        free_s = step.end_s - step.network_s
        if step.layer is not None:
            free_s += work_s(stage.layers[step.layer], plans[step.layer], load.kind)
            free_s += sum(of_layers.get((step.layer, load.kind), 0.0) for of_layers in waits)
        late_s = max(late_s - free_s, 0.0) + step.sync_s
    return late_s
