"""Data types of a cluster: groups of equal nodes, and the connections between groups.

    Cluster
      NodeGroup "ib"     4 nodes of 8 H100; within a node NVLink, between nodes its NICs, above them levels (rail, pod)
      NodeGroup "roce"   8 nodes of 8 A100; likewise
      Connection         "ib" to "roce": other NICs of each node, and what the trunk between the groups carries

A group's links are its machine's `Network`. Groups that no connection joins do not communicate. A uniform cluster is one
group.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memo.errors import PlanError
from memo.mip.inputs import AttentionKernel, Hardware, HeadShares, Network, NetworkLevel

if TYPE_CHECKING:
    from memo.mip.cluster.placement import ClusterPlacement, LayoutSizes

MAX_GROUPS, MAX_NODES = 16, 1 << 17


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes with one kind of GPU and one network among them."""

    name: str
    machine: Hardware
    """A node's GPUs, memories and links, and the network of the group's nodes."""
    nodes: int
    disk_bytes: int = 0
    """Disk space of a node for scratch files; 0: none."""

    def __post_init__(self) -> None:
        if not (self.name and len(self.name) <= 40 and self.name.isprintable()):
            raise PlanError(f"a group of nodes is named {self.name[:80]!r}; a name has 1 to 40 printable characters")
        if not 1 <= self.nodes <= MAX_NODES:
            raise PlanError(f"group {self.name!r}: nodes is {self.nodes}, not a number from 1 to {MAX_NODES}")
        if not 0 <= self.disk_bytes <= 1 << 62:
            raise PlanError(f"group {self.name!r}: disk is {self.disk_bytes} bytes")
        if self.nodes > 1 and not self.machine.network.nics_per_node:
            raise PlanError(
                f"group {self.name!r}: no network connects its {self.nodes} nodes; give net, such as 8x400Gb"
            )

    @property
    def gpus(self) -> int:
        """Number of its GPUs."""
        return self.nodes * self.machine.gpus_per_node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Network between the nodes of two groups."""

    between: tuple[str, str]
    """Names of the groups."""
    links: NetworkLevel
    """Links of each node; with `nics_per_node`."""
    trunk_bytes_per_s: float = 0.0
    """Rate in one direction of all that connects the groups; 0: as much as the nodes' links."""

    def __post_init__(self) -> None:
        where = f"link between {self.between[0][:40]!r} and {self.between[1][:40]!r}"
        if self.between[0] == self.between[1]:
            raise PlanError(f"{where}: a group is connected with itself by its own net")
        if not self.links.nics_per_node or self.links.nodes:
            raise PlanError(f"{where}: it needs the NICs of a node")
        if not 0 <= self.trunk_bytes_per_s <= 1e30:
            raise PlanError(f"{where}: trunk is {self.trunk_bytes_per_s}, not a rate of 0 or more")

    def level(self, *, nodes_gpus: Sequence[int], gpus_per_node: int, gpus: int) -> NetworkLevel:
        """The connection as the uppermost level of a network.

        Args:
            nodes_gpus: GPUs of a node in each group.
            gpus_per_node: number of GPUs among which the result's NICs are divided.
            gpus: number of GPUs of one group that use the connection at the same time.
        """
        links = self.links
        trunk = self.trunk_bytes_per_s * links.efficiency / gpus if self.trunk_bytes_per_s else None
        share = min(links.node_bytes_per_s / each for each in nodes_gpus)
        if set(nodes_gpus) == {gpus_per_node} and (trunk is None or trunk >= share):
            return links
        return NetworkLevel(
            name=links.name,
            nics_per_node=gpus_per_node,
            nic_bytes_per_s=share if trunk is None else min(share, trunk),
            efficiency=1.0,
            latency_s=links.latency_s,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups of nodes and their connections."""

    groups: tuple[NodeGroup, ...]
    connections: tuple[Connection, ...] = ()

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not 1 <= len(names) <= MAX_GROUPS:
            raise PlanError(f"cluster: {len(names)} groups of nodes; from 1 to {MAX_GROUPS} are possible")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise PlanError(f"cluster: two groups are named {twice[0]!r}")
        pairs = set()
        for connection in self.connections:
            unknown = set(connection.between) - set(names)
            if unknown:
                raise PlanError(f"cluster: a link names the group {min(unknown)[:40]!r}, which there is not")
            pair = frozenset(connection.between)
            if pair in pairs:
                raise PlanError(f"cluster: two links are between {' and '.join(sorted(pair))}")
            pairs.add(pair)

    @property
    def gpus(self) -> int:
        """Number of all GPUs."""
        return sum(group.gpus for group in self.groups)

    def connection(self, one: int, other: int) -> Connection | None:
        """The connection of two groups, by their numbers; None where there is none."""
        pair = {self.groups[one].name, self.groups[other].name}
        return next((known for known in self.connections if set(known.between) == pair), None)

    def placements(self, layout: LayoutSizes) -> Iterator[ClusterPlacement]:
        """Yields the placements of a layout (`memo.mip.cluster.placement.placements`)."""
        from memo.mip.cluster.placement import placements

        return placements(self, layout)


def slowest_machine(machines: Sequence[Hardware]) -> Hardware:
    """Machine whose every rate and memory is the least of several machines', a GPU's part of a node's counted.

    A node of it has as many GPUs as the smallest node. Equal machines give the machine itself.
    """
    first = machines[0]
    if all(machine == first for machine in machines):
        return first
    gpus = min(machine.gpus_per_node for machine in machines)

    def least(name: str) -> float:
        return min(float(getattr(machine, name)) for machine in machines)

    def least_of_node(name: str) -> float:
        return gpus * min(float(getattr(machine, name)) / machine.gpus_per_node for machine in machines)

    def least_share(name: str) -> float:
        """What makes the product with the peak the least one."""
        return min(float(getattr(machine, name)) * machine.peak_flops for machine in machines) / least("peak_flops")

    return Hardware(
        name=" + ".join(dict.fromkeys(machine.name for machine in machines)),
        **{name: least(name) for name in _OF_GPU},
        matmul_efficiency=least_share("matmul_efficiency"),
        attention=(_slowest_attention(machines, least("peak_flops")),),
        device_bytes=min(machine.device_bytes for machine in machines),
        **{name: least_of_node(name) for name in _OF_NODE},
        host_bytes=int(least_of_node("host_bytes")),
        gpus_per_node=gpus,
        launch_s=max(machine.launch_s for machine in machines),
        network=_slowest_network(machines, gpus),
    )


def _slowest_attention(machines: Sequence[Hardware], peak_flops: float) -> AttentionKernel:
    kernels = [(machine.attention[0], machine.peak_flops / peak_flops) for machine in machines]
    heads = sorted({known.head for kernel, _ in kernels for known in kernel.heads})
    return AttentionKernel(
        name=" + ".join(dict.fromkeys(kernel.name for kernel, _ in kernels)),
        far=min(kernel.far for kernel, _ in kernels),
        heads=tuple(
            HeadShares(
                head,
                min(kernel.share(head) * peak for kernel, peak in kernels),
                min(kernel.share(head, backward=True) * peak for kernel, peak in kernels),
            )
            for head in heads
        ),
    )


_OF_GPU = (
    "peak_flops",
    "hbm_bytes_per_s",
    "d2h_bytes_per_s",
    "h2d_bytes_per_s",
    "duplex_bytes_per_s",
    "nvlink_bytes_per_s",
)
_OF_NODE = ("node_d2h_bytes_per_s", "node_h2d_bytes_per_s", "disk_write_bytes_per_s", "disk_read_bytes_per_s")


def _slowest_network(machines: Sequence[Hardware], gpus: int) -> Network:
    networks = [machine.network for machine in machines]
    # A group of a single node needs no NICs of its own.
    joined = [machine for machine in machines if machine.network.nics_per_node]
    shares = [one.network.node_bytes_per_s / one.gpus_per_node for one in joined]
    peers = min(machine.nvlink_bytes_per_s * machine.network.node_efficiency for machine in machines)
    sizes = sorted({level.nodes for network in networks for level in network.levels if level.nodes})
    return Network(
        nics_per_node=gpus if joined else 0,
        nic_bytes_per_s=min(shares, default=0.0),
        nic_latency_s=max(network.nic_latency_s for network in networks),
        nic_efficiency=1.0,
        node_latency_s=max(network.node_latency_s for network in networks),
        node_efficiency=peers / min(machine.nvlink_bytes_per_s for machine in machines) if peers else 1.0,
        launch_s=max(network.launch_s for network in networks),
        peers_through_pcie=any(network.peers_through_pcie for network in networks),
        levels=tuple(_slowest_level(joined, nodes, gpus) for nodes in sizes),
    )


def _slowest_level(machines: Sequence[Hardware], nodes: int, gpus: int) -> NetworkLevel:
    shares, latencies, names = [], [], []
    for machine, level in itertools.chain.from_iterable(
        ((machine, level) for level in machine.network.levels if level.nodes == nodes) for machine in machines
    ):
        shares.append(machine.network.unit_bytes_per_s(level) / machine.gpus_per_node)
        latencies.append(level.latency_s)
        names.append(level.name)
    return NetworkLevel(
        name=names[0],
        nodes=nodes,
        nics_per_node=gpus,
        nic_bytes_per_s=min(shares),
        efficiency=1.0,
        latency_s=max(latencies),
    )
