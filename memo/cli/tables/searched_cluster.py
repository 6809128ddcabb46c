"""The cluster of a search in words and as an object: equal nodes, or groups of nodes with their connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memo.search import ClusterSpace

if TYPE_CHECKING:
    from memo.mip.activation import Budgets
    from memo.mip.inputs import Hardware
    from memo.search import Planned, Space

__all__ = ["cluster_summary", "cluster_words", "used_share"]


def cluster_words(space: Space) -> str:
    """The nodes and their GPUs, such as `2 nodes of 8 GPUs, a800`, one after another where they are not alike."""
    if isinstance(space, ClusterSpace):
        return "; ".join(f"{group.name}: {_nodes_words(group.nodes, group.machine)}" for group in space.cluster.groups)
    return _nodes_words(space.nodes, space.request.machine)


def cluster_summary(space: Space) -> dict[str, Any]:
    """The request, and the machines."""
    request = space.request
    return {
        "model": request.model,
        "tokens": request.layout.tokens,
        "precision": str(request.precision),
        "global_batch": space.global_batch,
        **(_of_groups(space) if isinstance(space, ClusterSpace) else _of_nodes(space)),
    }


def used_share(space: Space, one: Planned) -> float:
    """The part of the cluster's peak FLOP/s that a layout's GPUs have."""
    gpus = one.candidate.shape.gpus
    if not isinstance(space, ClusterSpace):
        return gpus / space.gpus
    whole = sum(group.gpus * group.machine.peak_flops for group in space.cluster.groups)
    return gpus * one.plan.problem.hardware.peak_flops / whole


def _nodes_words(nodes: int, machine: Hardware) -> str:
    per_node = machine.gpus_per_node
    of = f"{nodes} nodes of {per_node} GPUs" if nodes > 1 else f"one node of {per_node} GPU{'s' * (per_node > 1)}"
    return f"{of}, {machine.name}"


def _of_nodes(space: Space) -> dict[str, Any]:
    machine = space.request.machine
    return {
        "hardware": machine.name,
        "nodes": space.nodes,
        "gpus_per_node": space.gpus_per_node,
        "budgets": _budgets(space.request.budgets),
        "links": _links(machine),
    }


def _of_groups(space: ClusterSpace) -> dict[str, Any]:
    """The groups one by one; beside them all nodes, the largest node's GPUs and the largest budgets."""
    groups = space.cluster.groups
    each = [_budgets(space.budgets[group.name]) for group in groups]
    return {
        "hardware": " + ".join(dict.fromkeys(group.machine.name for group in groups)),
        "nodes": sum(group.nodes for group in groups),
        "gpus_per_node": max(group.machine.gpus_per_node for group in groups),
        "budgets": {name: max(one[name] for one in each) for name in each[0]},
        "links": None,
        "groups": [
            {
                "name": group.name,
                "hardware": group.machine.name,
                "nodes": group.nodes,
                "gpus_per_node": group.machine.gpus_per_node,
                "budgets": budgets,
                "links": _links(group.machine),
            }
            for group, budgets in zip(groups, each, strict=True)
        ],
        "connections": [
            {
                "between": list(one.between),
                "nics_per_node": one.links.nics_per_node,
                "nic_bytes_per_s": one.links.nic_bytes_per_s,
                "trunk_bytes_per_s": one.trunk_bytes_per_s,
            }
            for one in space.cluster.connections
        ],
    }


def _budgets(budgets: Budgets) -> dict[str, int]:
    return {
        "device_bytes": budgets.device_bytes,
        "host_bytes": budgets.host_bytes,
        "disk_bytes": budgets.disk_bytes,
    }


def _links(machine: Hardware) -> dict[str, float]:
    return {
        "nvlink_bytes_per_s": machine.nvlink_bytes_per_s,
        "nics_per_node": machine.network.nics_per_node,
        "nic_bytes_per_s": machine.network.nic_bytes_per_s,
        "node_d2h_bytes_per_s": machine.node_d2h_bytes_per_s,
        "node_h2d_bytes_per_s": machine.node_h2d_bytes_per_s,
    }
