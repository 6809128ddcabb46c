"""The cluster of a search in words and as an object: equal nodes, or groups of nodes with their connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memo.mip.activation import Budgets
    from memo.mip.inputs import Hardware
    from memo.search import Planned, Space


def cluster_words(space: Space) -> str:
    """The nodes and their GPUs, such as `2 nodes of 8 GPUs, a800`, one after another where they are not alike."""
    return "; ".join(
        f"{name}: " * bool(name) + _nodes_words(nodes, machine) for name, nodes, machine, _ in space.groups
    )


def _nodes_words(nodes: int, machine: Hardware) -> str:
    per_node = machine.gpus_per_node
    of = f"{nodes} nodes of {per_node} GPUs" if nodes > 1 else f"one node of {per_node} GPU{'s' * (per_node > 1)}"
    return f"{of}, {machine.name}"


def used_share(space: Space, one: Planned) -> float:
    """The part of the cluster's peak FLOP/s that a layout's GPUs have."""
    whole = sum(nodes * machine.gpus_per_node * machine.peak_flops for _, nodes, machine, _ in space.groups)
    return one.candidate.shape.gpus * one.plan.problem.hardware.peak_flops / whole


def cluster_summary(space: Space) -> dict[str, Any]:
    """The request, and the machines; on a cluster of all nodes the largest, with the groups one by one."""
    request = space.request
    groups = [_group_summary(*group) for group in space.groups]
    summary: dict[str, Any] = {
        "model": request.model,
        "tokens": request.layout.tokens,
        "precision": str(request.precision),
        "global_batch": space.global_batch,
        "hardware": " + ".join(dict.fromkeys(one["hardware"] for one in groups)),
        "nodes": sum(one["nodes"] for one in groups),
        "gpus_per_node": max(one["gpus_per_node"] for one in groups),
        "budgets": {name: max(one["budgets"][name] for one in groups) for name in groups[0]["budgets"]},
        "links": groups[0]["links"],
    }
    if space.cluster is None:
        return summary
    connections = [
        {
            "between": list(one.between),
            "nics_per_node": one.links.nics_per_node,
            "nic_bytes_per_s": one.links.nic_bytes_per_s,
            "trunk_bytes_per_s": one.trunk_bytes_per_s,
        }
        for one in space.cluster.connections
    ]
    return {**summary, "links": None, "groups": groups, "connections": connections}


def _group_summary(name: str, nodes: int, machine: Hardware, budgets: Budgets) -> dict[str, Any]:
    network = machine.network
    return {
        "name": name,
        "hardware": machine.name,
        "nodes": nodes,
        "gpus_per_node": machine.gpus_per_node,
        "budgets": {name: getattr(budgets, name) for name in ("device_bytes", "host_bytes", "disk_bytes")},
        "links": {
            "nvlink_bytes_per_s": machine.nvlink_bytes_per_s,
            "nics_per_node": network.nics_per_node,
            "nic_bytes_per_s": network.nic_bytes_per_s,
            "node_d2h_bytes_per_s": machine.node_d2h_bytes_per_s,
            "node_h2d_bytes_per_s": machine.node_h2d_bytes_per_s,
        },
    }
