"""Nodes and links of a layout that the page of a search draws: which ranks stand where, and what each group crosses.

Owns the order of ranks on groups of nodes that are not alike: within a group they fill its nodes, stage after stage. On
equal nodes the page counts them itself.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from memo.events import Lane
from memo.mip.cluster import Crossing

if TYPE_CHECKING:
    from memo.mip.cluster import ClusterPlacement
    from memo.mip.inputs import Hardware, RankGroup
    from memo.mip.simulate import Simulation
    from memo.search import Candidate, Planned, Space


def nodes_of(candidate: Candidate, space: Space) -> list[dict[str, Any]] | None:
    """The nodes of a cluster, each with its group and its ranks, None for an idle GPU; None where nodes are alike."""
    placement = space.placement(candidate)
    if placement is None:
        return None
    own: dict[int, list[int]] = {}
    rank = 0
    for place in placement.places:
        for group, replicas in zip(place.groups, place.replicas, strict=True):
            count = replicas * placement.tp * placement.cp
            own.setdefault(group, []).extend(range(rank, rank + count))
            rank += count
    found: list[dict[str, Any]] = []
    for number, kind in enumerate(placement.cluster.groups):
        size, ranks = kind.machine.gpus_per_node, own.get(number, [])
        for node in range(kind.nodes):
            here: list[int | None] = [*ranks[node * size : (node + 1) * size]]
            found.append({"group": number, "ranks": here + [None] * (size - len(here))})
    return found


def groups_of(planned: Planned, simulation: Simulation, space: Space) -> list[dict[str, Any]]:
    """Kinds of groups that communicate, with the seconds of a step that the busiest rank is on the network.

    Exchanges of tensor, context and expert parallelism are known as one sum, which the first of them has; with them go the
    gathers of the embedding's and the head's weights.
    """
    problem, shape, per_node = planned.plan.problem, planned.candidate.shape, space.gpus_per_node
    layout, placement = space.request_of(planned.candidate).layout, space.placement(planned.candidate)
    if placement is not None:
        layout = dataclasses.replace(layout, **placement.changes(0))
        per_node = min(machine.gpus_per_node for machine in _machines(placement))
    divided = shape.tp * shape.cp * shape.ep > 1
    times = problem.pipeline.microbatches if divided else 0
    exchanges = [times * stage.exchange_s for stage in problem.stages]
    weights = [
        sum(span.seconds for span in stage.spans if span.lane is Lane.NETWORK) - exchange_s
        for stage, exchange_s in zip(simulation.stages, exchanges, strict=True)
    ]
    found = []
    if shape.tp > 1:
        found.append(_group("tp", layout.tensor_group(per_node), max(exchanges)))
    if shape.cp > 1:
        found.append(_group("cp", layout.context_group(per_node), None if shape.tp > 1 else max(exchanges)))
    if shape.ep > 1:
        alone = shape.tp * shape.cp == 1
        found.append(_group("ep", layout.expert_group(per_node), max(exchanges) if alone else None))
    if shape.dp * shape.cp > 1:
        found.append(_group("dp", layout.data_group(per_node), max(*weights, 0.0)))
    if shape.pp > 1:
        nodes = 2 if layout.leaves_node(per_node) else 1
        found.append({"kind": "pp", "ranks": shape.pp, "nodes": nodes, "seconds": problem.profile.send_s})
    if placement is not None:
        found = [{**one, "link": _link(placement, one["kind"], one["nodes"])} for one in found]
    return found


def _link(placement: ClusterPlacement, kind: str, nodes: int) -> dict[str, Any]:
    """The slowest link that a kind of groups crosses: the groups of nodes that it joins, and the rate of a node or a GPU."""
    cluster, machines = placement.cluster, _machines(placement)
    across = {"dp": Crossing.REPLICAS, "pp": Crossing.STAGES}
    if placement.crossing is across.get(kind):
        used = list(dict.fromkeys(group for place in placement.places for group in place.groups))
        pairs = itertools.pairwise(used) if kind == "pp" else itertools.combinations(used, 2)
        joined = [found for pair in pairs if (found := cluster.connection(*pair)) is not None]
        slowest = min(joined, key=lambda one: one.links.nics_per_node * one.links.nic_bytes_per_s)
        rate = slowest.links.nics_per_node * slowest.links.nic_bytes_per_s
        return {"between": list(slowest.between), "of": "node", "bytes_per_s": rate}
    if nodes > 1:
        rate = min(one.network.nics_per_node * one.network.nic_bytes_per_s for one in machines)
        return {"between": None, "of": "node", "bytes_per_s": rate}
    return {"between": None, "of": "GPU", "bytes_per_s": min(one.nvlink_bytes_per_s for one in machines)}


def _machines(placement: ClusterPlacement) -> list[Hardware]:
    """Machines of the groups of nodes that have ranks."""
    groups = placement.cluster.groups
    return [groups[number].machine for number in dict.fromkeys(of for place in placement.places for of in place.groups)]


def _group(kind: str, group: RankGroup, seconds: float | None) -> dict[str, Any]:
    return {"kind": kind, "ranks": group.size, "nodes": group.nodes, "seconds": seconds}
