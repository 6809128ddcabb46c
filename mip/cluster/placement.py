"""Placements of a layout on a cluster: which group of nodes holds which pipeline stages and replicas.

Owns the enumeration and what a placement means for links. Two ways (Holmes, Yang et al. 2023, calls the first one
self-adapting pipeline partition): the pipeline crosses from group to group, so that each stage's data parallelism stays
inside one group; or each group holds the whole pipeline with a part of the replicas, so that data parallelism crosses.

    stages     group a: stages 0, 1 of all replicas          group b: stages 2, 3 of all replicas
    replicas   group a: stages 0 to 3 of replicas 0, 1       group b: stages 0 to 3 of replicas 2, 3

Within a group ranks fill the nodes one after another, in the order tp, cp, dp, pp. Tensor and context parallelism never
cross groups.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from memo.errors import UsageError
from memo.mip.cluster.cluster import slowest_machine

if TYPE_CHECKING:
    from memo.mip.cluster.cluster import Cluster
    from memo.mip.inputs import Hardware, NetworkLevel


class LayoutSizes(Protocol):
    """Sizes of a layout; `memo.gpt.arithmetic`'s Layout has them."""

    @property
    def tp(self) -> int:
        """Ranks of tensor parallelism."""

    @property
    def cp(self) -> int:
        """Ranks of context parallelism."""

    @property
    def pp(self) -> int:
        """Pipeline stages."""

    @property
    def replicas(self) -> int:
        """Ranks of data parallelism."""


class Crossing(enum.StrEnum):
    """What crosses from one group of nodes to another."""

    NOTHING = "nothing"
    STAGES = "stages"
    REPLICAS = "replicas"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Where the ranks of one stage are."""

    groups: tuple[int, ...]
    """Numbers of the groups of nodes."""
    replicas: tuple[int, ...]
    """Replicas in each of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlacement:
    """Groups of nodes of each pipeline stage."""

    cluster: Cluster
    places: tuple[StagePlace, ...]
    """Place of each stage."""
    tp: int
    cp: int

    @property
    def crossing(self) -> Crossing:
        """What crosses groups."""
        if len(self.places[0].groups) > 1:
            return Crossing.REPLICAS
        return Crossing.NOTHING if len({place.groups for place in self.places}) == 1 else Crossing.STAGES

    @property
    def stage_gpus(self) -> int:
        """GPUs of a stage."""
        return self.tp * self.cp * sum(self.places[0].replicas)

    def islands(self, stage: int) -> tuple[int, ...]:
        """Replicas of a stage in each group of nodes, where it is divided over several; else empty."""
        place = self.places[stage]
        return place.replicas if len(place.groups) > 1 else ()

    @property
    def ends_apart(self) -> bool:
        """Whether the first and the last stage are in different groups."""
        return self.crossing is Crossing.STAGES and self.places[0].groups != self.places[-1].groups

    def changes(self, stage: int) -> dict[str, Any]:
        """Fields of a layout that say how a stage's ranks lie in their groups of nodes."""
        together = sum(place.groups == self.places[stage].groups for place in self.places)
        return {
            "islands": self.islands(stage),
            "group_gpus": together * self.stage_gpus if self.crossing is Crossing.STAGES else 0,
            "ends_apart": self.ends_apart,
        }

    def machine(self, stage: int) -> Hardware:
        """The machine of a stage: its group's, or the slowest of its groups with the connection as the uppermost level."""
        place = self.places[stage]
        machine = slowest_machine([self.cluster.groups[group].machine for group in place.groups])
        if len(place.groups) > 1:
            level = self._slowest_level(list(itertools.combinations(place.groups, 2)), machine.gpus_per_node)
        elif self.ends_apart:  # where the two copies of a tied table add up their gradients
            level = self._slowest_level(self._way(0, -1), machine.gpus_per_node)
        else:
            return machine
        network = dataclasses.replace(machine.network, levels=(*machine.network.levels, level))
        return dataclasses.replace(machine, network=network)

    def send_s(self, stage: int, other: int, nbytes: float) -> float:
        """Seconds of a message between two stages of different groups, from each rank of one to one of the other."""
        pair = (self.places[stage].groups[0], self.places[other].groups[0])
        machine = slowest_machine([self.cluster.groups[group].machine for group in pair])
        level = self._slowest_level(self._way(stage, other), machine.gpus_per_node)
        rate = level.node_bytes_per_s / machine.gpus_per_node
        return machine.network.launch_s + level.latency_s + nbytes / rate

    def crosses(self, stage: int, other: int) -> bool:
        """Whether a message between two stages goes from one group to another."""
        return self.places[stage].groups != self.places[other].groups

    @property
    def named_places(self) -> list[list[dict[str, Any]]]:
        """For each stage the names of its groups of nodes, each with its number of replicas."""
        names = [group.name for group in self.cluster.groups]
        return [
            [{"group": names[group], "replicas": n} for group, n in zip(place.groups, place.replicas, strict=True)]
            for place in self.places
        ]

    def describe(self) -> str:
        """The placement in words, such as `stages 0 to 3 on ib, 4 and 5 on roce`."""
        names = [group.name for group in self.cluster.groups]
        if self.crossing is not Crossing.REPLICAS and len(self.places) == 1:
            return f"all on {names[self.places[0].groups[0]]}"
        if self.crossing is Crossing.REPLICAS:
            place = self.places[0]
            parts = [f"{count} on {names[group]}" for group, count in zip(place.groups, place.replicas, strict=True)]
            return f"replicas: {', '.join(parts)}"
        runs = []
        for group, own in itertools.groupby(range(len(self.places)), key=lambda stage: self.places[stage].groups[0]):
            stages = list(own)
            last = "" if len(stages) == 1 else f" {'and' if len(stages) == 2 else 'to'} {stages[-1]}"
            runs.append(f"{stages[0]}{last} on {names[group]}")
        return f"stages {', '.join(runs)}"

    def _way(self, stage: int, other: int) -> list[tuple[int, int]]:
        """Pairs of linked groups from one stage's to another's; through those between where no link joins the two."""
        first, last = self.places[stage].groups[0], self.places[other].groups[0]
        if self.cluster.connection(first, last) is not None:
            return [(first, last)]
        order = list(dict.fromkeys(place.groups[0] for place in self.places))
        low, high = sorted((order.index(first), order.index(last)))
        return list(itertools.pairwise(order[low : high + 1]))

    def _slowest_level(self, pairs: Sequence[tuple[int, int]], gpus_per_node: int) -> NetworkLevel:
        """The slowest connection of some pairs of groups."""
        replicas = dict(zip(self.places[0].groups, self.places[0].replicas, strict=True))
        of_stage = self.tp * self.cp
        found = []
        for pair in pairs:
            connection = self.cluster.connection(*pair)
            assert connection is not None, "placements are of connected groups"
            every = sum(self.places[0].replicas)
            least = min(replicas.get(group, every) for group in pair)
            gpus = of_stage * (least * len(self.places) if self.crossing is Crossing.REPLICAS else every)
            nodes_gpus = [self.cluster.groups[group].machine.gpus_per_node for group in pair]
            found.append(connection.level(nodes_gpus=nodes_gpus, gpus_per_node=gpus_per_node, gpus=gpus))
        slowest = min(found, key=lambda level: level.node_bytes_per_s)
        return dataclasses.replace(slowest, latency_s=max(level.latency_s for level in found))


def placements(cluster: Cluster, layout: LayoutSizes) -> Iterator[ClusterPlacement]:
    """Yields every placement of a layout: first within one group, then the pipeline across groups, then the replicas.

    Groups that are alike are taken in their order only.

    Raises:
        UsageError: there is none; the message says what is lacking.
    """
    found = 0
    for places in itertools.chain(_pipelines(cluster, layout), _replicas(cluster, layout)):
        found += 1
        yield ClusterPlacement(cluster=cluster, places=places, tp=layout.tp, cp=layout.cp)
    if not found:
        raise UsageError(_why_none(cluster, layout))


def _pipelines(cluster: Cluster, layout: LayoutSizes) -> Iterator[tuple[StagePlace, ...]]:
    """Placements with each stage in one group; the stages of a group follow one another."""
    of_stage = layout.tp * layout.cp * layout.replicas
    room = [group.gpus // of_stage for group in cluster.groups]
    seen: set[tuple[tuple[object, int], ...]] = set()
    usable = [number for number, stages in enumerate(room) if stages]
    for count in range(1, min(len(usable), layout.pp) + 1):
        for order in itertools.permutations(usable, count):
            if any(cluster.connection(*pair) is None for pair in itertools.pairwise(order)):
                continue
            for counts in _compositions(layout.pp, [room[group] for group in order]):
                kinds = tuple((_kind(cluster, group, order), n) for group, n in zip(order, counts, strict=True))
                if kinds in seen:
                    continue
                seen.add(kinds)
                yield tuple(
                    StagePlace(groups=(group,), replicas=(layout.replicas,))
                    for group, stages in zip(order, counts, strict=True)
                    for _ in range(stages)
                )


def _replicas(cluster: Cluster, layout: LayoutSizes) -> Iterator[tuple[StagePlace, ...]]:
    """Placements with the whole pipeline in each of several groups."""
    of_replica = layout.tp * layout.cp * layout.pp
    room = [group.gpus // of_replica for group in cluster.groups]
    usable = [number for number, replicas in enumerate(room) if replicas]
    seen: set[tuple[tuple[object, int], ...]] = set()
    for count in range(2, min(len(usable), layout.replicas) + 1):
        for groups in itertools.combinations(usable, count):
            if any(cluster.connection(*pair) is None for pair in itertools.combinations(groups, 2)):
                continue
            for counts in _compositions(layout.replicas, [room[group] for group in groups]):
                kinds = sorted(
                    ((_kind(cluster, group, groups), n) for group, n in zip(groups, counts, strict=True)), key=repr
                )
                if tuple(kinds) not in seen:
                    seen.add(tuple(kinds))
                    yield (StagePlace(groups=groups, replicas=counts),) * layout.pp


def _kind(cluster: Cluster, group: int, among: Sequence[int]) -> object:
    """What tells a group from others in a placement: its own number, unless the whole cluster's groups are alike."""
    groups = cluster.groups
    alike = all(one.machine == groups[0].machine and one.disk_bytes == groups[0].disk_bytes for one in groups)
    links = {(known.links, known.trunk_bytes_per_s) for known in cluster.connections}
    joined = len(cluster.connections) == len(groups) * (len(groups) - 1) // 2
    return "any" if alike and joined and len(links) <= 1 else group


def _compositions(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to write a total as a sum of one number for each bound, from 1 to it; the most even ones are in the middle."""
    if len(most) == 1:
        if 1 <= total <= most[0]:
            yield (total,)
        return
    rest = sum(most[1:])
    for first in range(max(1, total - rest), min(most[0], total - len(most) + 1) + 1):
        for others in _compositions(total - first, most[1:]):
            yield (first, *others)


def _why_none(cluster: Cluster, layout: LayoutSizes) -> str:
    model = layout.tp * layout.cp
    gpus = model * layout.replicas * layout.pp
    sizes = ", ".join(f"{group.name} {group.gpus}" for group in cluster.groups)
    words = f"a layout of {gpus} GPUs (tp {layout.tp}, cp {layout.cp}, dp {layout.replicas}, pp {layout.pp})"
    if gpus > cluster.gpus:
        return f"{words} is more than the cluster's {cluster.gpus} ({sizes})"
    return (
        f"{words} has no place on the groups of nodes ({sizes}): a stage's {model * layout.replicas} GPUs, or a replica's "
        f"{model * layout.pp}, are within one group, and groups that exchange are linked; use another pp or dp"
    )
