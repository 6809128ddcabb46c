"""A placement as a problem of activation planning: each stage with the times, links and budgets of its own machine.

    profile_of(machine of stage 0) ─┐  layers of stage 0, embedding ┐
    profile_of(machine of stage 1) ─┤  layers of stage 1            ├─▶ one profile, whose classes are by machine
    ...                             ┘  ...                    head  ┘   and a StageMachine for each stage

Where all stages are within one group, the problem is that of a uniform cluster, to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from memo.mip.activation import ActivationProblem, Budgets, Pipeline, StageMachine
from memo.mip.cluster.cluster import NodeGroup, slowest_machine
from memo.mip.cluster.layer_division import StageCosts, divide_layers
from memo.mip.cluster.placement import Crossing
from memo.mip.inputs import PipelineSchedule

if TYPE_CHECKING:
    from memo.mip.cluster.placement import ClusterPlacement
    from memo.mip.inputs import Hardware, LayerProfile, Profile


class ProfileOf(Protocol):
    """Derives a rank's profile as if every stage stood on one machine."""

    def __call__(self, machine: Hardware, **changes: Any) -> Profile:
        """Profile of the layout on a machine.

        Args:
            machine: rates, memories and links.
            changes: fields of `memo.gpt.arithmetic`'s Layout that the placement changes, for `dataclasses.replace`:
                `islands`, `stage_layers`, `group_gpus`, `ends_apart`.
        """


def problem_inputs(
    placement: ClusterPlacement,
    profile_of: ProfileOf,
    budgets_of: Callable[[NodeGroup], Budgets],
    *,
    microbatches: int = 1,
    layers: Sequence[int] | None = None,
    schedule: PipelineSchedule | None = None,
    chunks: int = 0,
) -> ActivationProblem:
    """The problem of a placement.

    Args:
        placement: of the layout that `profile_of` knows.
        profile_of: derives the profile on one machine.
        budgets_of: budgets of the ranks of a group's node.
        microbatches: of a step.
        layers: numbers of layers of the runs of consecutive layers, `pp` times the schedule's chunks; None: equal ones.
            `balanced_layers` finds those for which the slowest stage is shortest.
        schedule: of the pipeline; None is 1F1B.
        chunks: runs of layers of each stage; 0: the schedule's own number.

    Raises:
        UsageError: from `profile_of`, or a group has no network where ranks on several of its nodes communicate.
        PlanError: the numbers of layers are not those of the model.
    """
    stages = len(placement.places)
    pipeline = Pipeline(
        stages=stages,
        microbatches=microbatches,
        stage_ranks=placement.stage_gpus,
        schedule=schedule or PipelineSchedule.ONE_F_ONE_B,
        chunks=chunks,
    )
    budgets = [_budgets(placement, stage, budgets_of) for stage in range(stages)]
    if layers is not None:
        pipeline = dataclasses.replace(pipeline, layers=tuple(layers))
    if placement.crossing is Crossing.NOTHING:
        machine = placement.machine(0)
        profile = profile_of(machine, stage_layers=pipeline.most_layers) if layers else profile_of(machine)
        return ActivationProblem(profile=profile, hardware=machine, budgets=budgets[0], pipeline=pipeline)
    return _Stages(placement, profile_of, pipeline, budgets).problem()


@dataclasses.dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of one problem."""

    placement: ClusterPlacement
    profile_of: ProfileOf
    pipeline: Pipeline
    budgets: Sequence[Budgets]

    def problem(self) -> ActivationProblem:
        count = self.pipeline.stages
        known: dict[tuple[object, ...], Profile] = {}
        machines = [self.placement.machine(stage) for stage in range(count)]
        base = self._profile(known, machines[0], 0, 0)
        plain = ActivationProblem(profile=base, hardware=machines[0], budgets=self.budgets[0], pipeline=self.pipeline)
        own = [stage.indices for stage in plain.stages]
        profiles = [self._profile(known, machines[stage], stage, len(own[stage])) for stage in range(count)]
        names = [""] * len(base.layers)
        classes: dict[str, LayerProfile] = {}
        for stage, profile in enumerate(profiles):
            for index in own[stage]:
                names[index] = _named(classes, profile.layer_profiles()[index], machines[stage].name)
        sends = [self._send_s(stage, (stage + 1) % count, profiles[stage]) for stage in range(count)]
        stages = tuple(
            StageMachine(
                hardware=machines[stage],
                budgets=self.budgets[stage],
                link_share=profiles[stage].link_share,
                send_s=sends[stage],
                optimizer_s=profiles[stage].optimizer_s,
                optimizer_exchange_s=profiles[stage].optimizer_exchange_s,
                new_node=stage > 0 and self.placement.crosses(stage - 1, stage),
                node_ranks=self._node_ranks(stage),
            )
            for stage in range(count)
        )
        profile = dataclasses.replace(
            base,
            classes=tuple(classes.values()),
            layers=tuple(names),
            embedding=profiles[0].embedding,
            head=profiles[-1].head,
            optimizer_s=max(machine.optimizer_s for machine in stages),
            optimizer_exchange_s=max(machine.optimizer_exchange_s for machine in stages),
            send_s=max(machine.send_s for machine in stages),
            link_share=max(machine.link_share for machine in stages),
        )
        return ActivationProblem(
            profile=profile,
            hardware=_shown(machines),
            budgets=min(self.budgets, key=lambda budgets: budgets.device_bytes),
            pipeline=self.pipeline,
            machines=stages,
        )

    def _profile(
        self, known: dict[tuple[object, ...], Profile], machine: Hardware, stage: int, stage_layers: int
    ) -> Profile:
        key = (self.placement.places[stage], stage_layers)
        if key not in known:
            known[key] = self.profile_of(machine, **self.placement.changes(stage), stage_layers=stage_layers)
        return known[key]

    def _send_s(self, stage: int, other: int, profile: Profile) -> float:
        if not self.placement.crosses(stage, other):
            return profile.send_s
        return self.placement.send_s(stage, other, profile.send_bytes)

    def _node_ranks(self, stage: int) -> int:
        """Ranks of a stage in the group with most of them, where it is divided over several."""
        islands = self.placement.islands(stage)
        return self.placement.tp * self.placement.cp * max(islands) if islands else 0


def _named(classes: dict[str, LayerProfile], layer: LayerProfile, machine: str) -> str:
    """The name of a layer's class: its own, or with its machine's where that name is another class's already."""
    names = [layer.name, f"{layer.name} on {machine}"]
    names += [f"{layer.name} on {machine} ({number})" for number in range(2, len(classes) + 3)]
    for name in names:
        own = layer if name == layer.name else dataclasses.replace(layer, name=name)
        if classes.setdefault(name, own) == own:
            return name
    raise AssertionError("more names than classes")


def _shown(machines: Sequence[Hardware]) -> Hardware:
    """The slowest machine, with the mean peak of all stages' GPUs, of which utilisation is a part."""
    slowest = slowest_machine(machines)
    if all(machine.peak_flops == machines[0].peak_flops for machine in machines):
        return slowest
    mean = sum(machine.peak_flops for machine in machines) / len(machines)
    return dataclasses.replace(slowest, peak_flops=mean)


def _budgets(placement: ClusterPlacement, stage: int, budgets_of: Callable[[NodeGroup], Budgets]) -> Budgets:
    """Budgets of a stage; of several groups the least, a rank's part of a node's counted."""
    groups = [placement.cluster.groups[group] for group in placement.places[stage].groups]
    every = [budgets_of(group) for group in groups]
    if all(budgets == every[0] for budgets in every):
        return _of_gpus(every[0], placement)
    ranks = min(budgets.ranks_per_node for budgets in every)
    wear = [budgets.disk_wear_bytes_per_day for budgets in every]
    known = [
        limit * ranks / budgets.ranks_per_node for limit, budgets in zip(wear, every, strict=True) if limit is not None
    ]
    least = Budgets(
        device_bytes=min(budgets.device_bytes for budgets in every),
        host_bytes=min(budgets.host_bytes * ranks // budgets.ranks_per_node for budgets in every),
        disk_bytes=min(budgets.disk_bytes * ranks // budgets.ranks_per_node for budgets in every),
        disk_wear_bytes_per_day=min(known, default=None),
        ranks_per_node=ranks,
    )
    return _of_gpus(least, placement)


def _of_gpus(budgets: Budgets, placement: ClusterPlacement) -> Budgets:
    """The budgets with no more ranks on a node than there are in all."""
    ranks = min(budgets.ranks_per_node, placement.stage_gpus * len(placement.places))
    return dataclasses.replace(budgets, ranks_per_node=ranks)


def balanced_layers(
    placement: ClusterPlacement,
    profile_of: ProfileOf,
    budgets_of: Callable[[NodeGroup], Budgets],
    *,
    schedule: PipelineSchedule | None = None,
    chunks: int = 0,
) -> tuple[int, ...]:
    """Numbers of layers of each run for which the slowest one is shortest with nothing recomputed (`divide_layers`).

    Static bytes are kept within each device's budget, less what one layer needs while it runs.

    Args:
        placement: of the layout that `profile_of` knows.
        profile_of: derives the profile on one machine.
        budgets_of: budgets of the ranks of a group's node.
        schedule: of the pipeline; None is 1F1B.
        chunks: runs of layers of each stage; 0: the schedule's own number.

    Raises:
        UsageError: from `profile_of`.
    """
    schedule = schedule or PipelineSchedule.ONE_F_ONE_B
    stages, chunks = len(placement.places), chunks or schedule.default_chunks
    known: dict[object, Profile] = {}
    costs: dict[int, StageCosts] = {}
    for stage in range(stages):
        place = placement.places[stage]
        if place not in known:
            known[place] = profile_of(placement.machine(stage), **placement.changes(stage), stage_layers=0)
        profile, budgets = known[place], _budgets(placement, stage, budgets_of)
        for run in schedule.stages_of(stage, stages, chunks=chunks):
            costs[run] = _costs(
                profile, (budgets.device_bytes, chunks), first=run == 0, last=run == stages * chunks - 1
            )
    return divide_layers([costs[run] for run in range(stages * chunks)])


def _costs(profile: Profile, device: tuple[int, int], *, first: bool, last: bool) -> StageCosts:
    """Costs of one run of layers, which has its part of the device."""
    layers, (device_bytes, runs) = profile.layer_profiles(), device
    ends = [profile.embedding] * first + [profile.head] * last
    needed = max(2 * layer.fixed_bytes + layer.transient_bytes for layer in layers)
    needed += sum(end.static_bytes + end.saved_bytes for end in ends)
    return StageCosts(
        seconds=[layer.forward_s + layer.backward_s for layer in layers],
        nbytes=[layer.static_bytes for layer in layers],
        room_bytes=max(device_bytes - needed, 0) // runs,
        before_s=profile.embedding.forward_s + profile.embedding.backward_s,
        after_s=profile.head.forward_s + profile.head.backward_s,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Seconds a step of a placement's collectives and messages, hidden or not."""

    tensor_s: float
    """Tensor and context parallelism, of the stage with most."""
    data_s: float
    """Gathers of weights and reductions of gradients, likewise."""
    pipeline_s: float
    """One microbatch's messages forward through all stages and back."""


def communication(problem: ActivationProblem) -> Communication:
    """Collectives and messages of a step."""
    pipeline, data = problem.pipeline, []
    for stage in problem.stages:
        passes = sum(2 * layer.gather_s + layer.reduce_s for layer in stage.layers)
        once = sum(layer.sync_s for layer in stage.layers) + sum(end.sync_s for end in stage.ends)
        data.append(pipeline.microbatches * passes + once + stage.machine.optimizer_exchange_s)
    stage_of = {run: stage for stage in range(pipeline.stages) for run in pipeline.chunk_positions(stage)}
    hops = [(stage_of[run], stage_of[run + 1]) for run in range(len(stage_of) - 1)]
    there = sum(problem.send_s(one, other) for one, other in hops if one != other)
    tensor_s = pipeline.microbatches * max(stage.exchange_s for stage in problem.stages)
    return Communication(tensor_s=tensor_s, data_s=max(data), pipeline_s=2 * there)
