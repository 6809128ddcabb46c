"""Network of a cluster: links between the GPUs of a node and between nodes, and the time of a collective over them.

Owns the alpha-beta model: a collective takes its latency, once for each step of a ring, and the time of its bytes over
the slowest link that they cross. Within a node that is the GPU's link to its peers, between nodes the GPU's part of the
node's NICs, since all GPUs of a node communicate at the same time. Rates and latencies are of `Hardware`.

    group of 16 ranks on 2 nodes of 8, ring all-gather of n bytes:   n 15/16 cross each GPU's link within the node, and
                                                                     n 15/16 leave each node over 8 GPUs' NICs together
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from memo.errors import PlanError, UsageError
from memo.mip.inputs.profile import check_amounts

if TYPE_CHECKING:
    from memo.mip.inputs.hardware import Hardware

__all__ = ["Collectives", "Group", "Network", "parse_network"]

GIGABIT = 1e9 / 8
_SPELLED = re.compile(r"(?P<count>[1-9]\d{0,3})x(?P<rate>\d+(\.\d+)?)(?P<unit>Gb|GB)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links that collectives cross. Without NICs there is one node."""

    nics_per_node: int = 0
    """0: nodes are not connected."""
    nic_bytes_per_s: float = 0.0
    """Line rate of one NIC in one direction."""
    nic_latency_s: float = 10e-6
    """Time of a message of no bytes between two nodes."""
    nic_efficiency: float = 0.8
    """Fraction of the line rate that collectives of large messages reach."""
    oversubscription: float = 1.0
    """Factor by which the switches above a node carry less than its NICs send."""
    node_latency_s: float = 4e-6
    """Time of a message of no bytes within a node."""
    node_efficiency: float = 0.8
    """Fraction of a GPU's link to its peers that collectives of large messages reach."""
    peers_through_pcie: bool = False
    """Whether GPUs of a node reach one another through their PCIe links, which copies to the host use, too."""

    def __post_init__(self) -> None:
        check_amounts(self, "network")
        if bool(self.nics_per_node) != (self.nic_bytes_per_s > 0):
            raise PlanError(f"network: {self.nics_per_node} NICs of {self.nic_bytes_per_s:g} bytes/s")
        if not (0 < self.nic_efficiency <= 1 and 0 < self.node_efficiency <= 1 and self.oversubscription >= 1):
            raise PlanError("network: efficiencies are above 0 and at most 1, and oversubscription is at least 1")


def parse_network(text: str, base: Network) -> Network:
    """Parses `--net`: NICs of a node, such as 8x400Gb (bits) or 4x25GB (bytes); `none` for a single node.

    Args:
        text: as given.
        base: network whose latencies and efficiencies stay.

    Raises:
        UsageError: the text is neither.
    """
    if text.lower() == "none":
        return dataclasses.replace(base, nics_per_node=0, nic_bytes_per_s=0.0)
    found = _SPELLED.fullmatch(text)
    rate = float(found["rate"]) if found else 0.0
    if found is None or not rate:
        raise UsageError(f"--net {text[:40]}: give a node's NICs, such as 8x400Gb (gigabits) or 8x50GB, or none")
    unit = GIGABIT if found["unit"].endswith("b") else 1e9
    return dataclasses.replace(base, nics_per_node=int(found["count"]), nic_bytes_per_s=rate * unit)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks of one collective."""

    size: int
    per_node: int
    """Number of these ranks on each of their nodes."""

    @classmethod
    def of(cls, size: int, *, stride: int, gpus_per_node: int) -> Group:
        """Group of `size` ranks whose numbers are `stride` apart, on nodes filled one after the other."""
        return cls(size=size, per_node=min(size, max(gpus_per_node // stride, 1)))

    @property
    def nodes(self) -> int:
        """Number of nodes that the ranks are on."""
        return -(-self.size // self.per_node)


@dataclasses.dataclass(frozen=True, slots=True)
class Collectives:
    """Times of collectives on one kind of machine."""

    machine: Hardware

    @property
    def _within(self) -> float:
        """Bytes per second of a GPU to its peers."""
        return self.machine.nvlink_bytes_per_s * self.machine.network.node_efficiency

    @property
    def _beyond(self) -> float:
        """Bytes per second of a GPU's part of the NICs."""
        network = self.machine.network
        whole = network.nics_per_node * network.nic_bytes_per_s * network.nic_efficiency
        return whole / network.oversubscription / self.machine.gpus_per_node

    def all_gather_s(self, nbytes: float, group: Group) -> float:
        """Seconds of a ring all-gather.

        Args:
            nbytes: of the result on each rank; of a reduce-scatter, of the operand.
            group: its ranks.

        Raises:
            UsageError: the group spans nodes that no network connects.
        """
        if group.size == 1:
            return 0.0
        others = nbytes * (group.size - 1) / group.size
        seconds = others / self._within if group.per_node > 1 else 0.0
        if group.nodes > 1:
            self._require_network(group)
            seconds = max(seconds, others / (group.per_node * self._beyond))
        return seconds + self._ring_latency_s(group)

    reduce_scatter_s = all_gather_s

    def all_reduce_s(self, nbytes: float, group: Group) -> float:
        """Seconds of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather_s(nbytes, group)

    def all_to_all_s(self, nbytes: float, group: Group) -> float:
        """Seconds of an all-to-all, in which each rank divides `nbytes` among all ranks."""
        if group.size == 1:
            return 0.0
        seconds = nbytes * (group.per_node - 1) / group.size / self._within if group.per_node > 1 else 0.0
        latency = self.machine.network.node_latency_s
        if group.nodes > 1:
            self._require_network(group)
            seconds = max(seconds, nbytes * (group.size - group.per_node) / group.size / self._beyond)
            latency = self.machine.network.nic_latency_s
        return seconds + latency

    def send_s(self, nbytes: float, *, beyond_node: bool) -> float:
        """Seconds until a message from one rank to another has arrived."""
        network = self.machine.network
        if beyond_node:
            self._require_network(Group(size=2, per_node=1))
            return nbytes / self._beyond + network.nic_latency_s
        return nbytes / self._within + network.node_latency_s

    def host_link_bytes_per_s(self, group: Group) -> float:
        """Bytes per second in each direction that a collective of the group takes of a GPU's link to the host."""
        if group.size > 1 and group.nodes > 1:
            return self._beyond
        return self._within if group.size > 1 and self.machine.network.peers_through_pcie else 0.0

    def _ring_latency_s(self, group: Group) -> float:
        network = self.machine.network
        return (group.size - group.nodes) * network.node_latency_s + (group.nodes - 1) * network.nic_latency_s

    def _require_network(self, group: Group) -> None:
        if not self.machine.network.nics_per_node:
            raise UsageError(
                f"{group.size} ranks that communicate are on {group.nodes} nodes of {self.machine.gpus_per_node} GPUs, "
                "which no network connects; name it with --net, such as --net 8x400Gb"
            )
