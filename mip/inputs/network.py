"""Network of a cluster: links between the GPUs of a node and between nodes, and the time of a collective over them.

Owns the alpha-beta model: a collective takes the time of its launch, a latency for each of its steps, and the time of
its bytes over the slowest link that they cross. Within a node that is the GPU's link to its peers, between nodes the
GPU's part of the node's NICs, since all GPUs of a node communicate at the same time. NVLink SHARP is not assumed.
Rates and latencies are of `Hardware`.

    group of 16 ranks on 2 nodes of 8, ring all-gather of n bytes:   n 15/16 cross each GPU's link within the node, and
                                                                     n 15/16 leave each node over 8 GPUs' NICs together

Steps are NCCL's: a ring goes once around for an all-gather or a reduce-scatter, twice for an all-reduce, which alone may
go over a tree between nodes instead. NCCL's own model of PAT, its logarithmic all-gather, has 2.8 us a rank (tuning.cc
of 2.23), which is near a ring's; therefore all-gathers over 1,024 ranks take milliseconds, and they do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from typing import TYPE_CHECKING

from memo.errors import PlanError, UsageError
from memo.mip.inputs.profile import check_amounts

if TYPE_CHECKING:
    from memo.mip.inputs.hardware import Hardware

__all__ = ["Collectives", "Group", "Network", "parse_network"]

GIGABIT = 1e9 / 8
TREE_STEP = 2.1
"""Latency of a tree's step between nodes in steps of a ring: 8.5 us to 4.0 us in NCCL's tuning.cc, LL128."""
TREE_RATE = 0.9
"""Fraction of a ring's rate that a tree reaches (NCCL's tuning.cc)."""
PEERS_AT_ONCE = 8
"""Messages of an all-to-all that a rank has under way together (NCCL's NCCL_MAX_DEV_WORK_P2P_PER_BATCH)."""
_SPELLED = re.compile(r"(?P<count>[1-9]\d{0,3})[xX](?P<rate>\d{1,9}(\.\d{1,9})?)(?P<unit>gb|gB|Gb|GB)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links that collectives cross. Without NICs there is one node.

    Latencies by default: NCCL's tuning.cc for its protocol LL128, 10 us for any collective, 1.9 and 4.0 us for a step of
    a ring over NVLink and over InfiniBand. Messages of a few KiB take the protocol LL and about half as long.
    """

    nics_per_node: int = 0
    """0: nodes are not connected."""
    nic_bytes_per_s: float = 0.0
    """Line rate of one NIC in one direction."""
    nic_latency_s: float = 4.0e-6
    """Time of a step of a ring from one node to another, without bytes."""
    nic_efficiency: float = 0.9
    """Fraction of the line rate that collectives of large messages reach."""
    oversubscription: float = 1.0
    """Factor by which the switches above a node carry less than its NICs send."""
    node_latency_s: float = 1.9e-6
    """Time of a step of a ring within a node, without bytes."""
    node_efficiency: float = 0.8
    """Fraction of a GPU's link to its peers that collectives of large messages reach."""
    launch_s: float = 10e-6
    """Time of a collective beside its steps and bytes."""
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
        raise UsageError(
            f"--net {text[:40]!r}: give the NICs of a node, such as 8x400Gb (gigabits per second) or 8x50GB, or none"
        )
    unit = GIGABIT if found["unit"].endswith("b") else 1e9
    return dataclasses.replace(base, nics_per_node=int(found["count"]), nic_bytes_per_s=rate * unit)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks of one collective."""

    size: int
    per_node: int
    """Number of these ranks on the node that has most of them."""
    fewest: int = 0
    """Number of these ranks on the node that has fewest; 0: what is left where other nodes have `per_node`."""
    nodes: int = 0
    """Number of nodes that the ranks are on; 0: as few as `per_node` allows."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_node <= self.size:
            raise PlanError(f"a group of {self.size} ranks with {self.per_node} on a node")
        nodes = self.nodes or -(-self.size // self.per_node)
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "fewest", self.fewest or max(self.size - (nodes - 1) * self.per_node, 1))

    @classmethod
    def of(cls, size: int, *, stride: int, gpus_per_node: int, gpus: int = 0) -> Group:
        """Group of `size` ranks whose numbers are `stride` apart, on nodes filled one after the other.

        Args:
            size: number of its ranks.
            stride: difference of the numbers of neighbours.
            gpus_per_node: GPUs of a node.
            gpus: number of all ranks, which are divided into such groups; the result is the one with the slowest links,
                since ranks wait for one another. 0: only the groups of the first `size * stride` ranks.
        """
        return _slowest_group(size, stride, gpus_per_node, max(gpus, size * stride))


@functools.lru_cache(maxsize=4096)
def _slowest_group(size: int, stride: int, gpus_per_node: int, gpus: int) -> Group:
    block = size * stride
    # Groups that start at the same place of a node are divided alike, so there are at most `gpus_per_node` kinds.
    blocks = min(gpus // block, gpus_per_node // math.gcd(block, gpus_per_node))
    starts = {
        (number * block + first) % gpus_per_node
        for number in range(blocks)
        for first in range(min(stride, gpus_per_node))
    }
    groups = [_group_from(start, size, stride, gpus_per_node) for start in sorted(starts)]
    return max(groups, key=lambda group: (group.nodes > 1, -group.fewest, group.nodes, -group.per_node))


def _group_from(start: int, size: int, stride: int, gpus_per_node: int) -> Group:
    if stride >= gpus_per_node:
        return Group(size=size, per_node=1)
    ends = range(0, start + size * stride + gpus_per_node, gpus_per_node)
    before = [min(max(-(-(end - start) // stride), 0), size) for end in ends]  # ranks on nodes that end before it
    counts = [after - count for count, after in itertools.pairwise(before) if after > count]
    return Group(size=size, per_node=max(counts), fewest=min(counts), nodes=len(counts))


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
        """Seconds of an all-gather, over a ring.

        Args:
            nbytes: of the result on each rank; of a reduce-scatter, of the operand.
            group: its ranks.

        Raises:
            UsageError: the group spans nodes that no network connects.
        """
        if group.size == 1:
            return 0.0
        return self.machine.network.launch_s + self._ring_s(nbytes, group)

    reduce_scatter_s = all_gather_s

    def all_reduce_s(self, nbytes: float, group: Group) -> float:
        """Seconds of an all-reduce: twice around a ring, or over a tree where that is faster.

        A tree passes all bytes up and down, and goes around within a node.

        Raises:
            UsageError: as `all_gather_s`.
        """
        if group.size == 1:
            return 0.0
        network = self.machine.network
        seconds = 2 * self._ring_s(nbytes, group)
        if group.nodes > 1:
            within = (group.per_node - 1) * network.node_latency_s
            between = math.ceil(math.log2(group.nodes)) * TREE_STEP * network.nic_latency_s
            seconds = min(seconds, 2 * (within + between + nbytes / self._ring_rate(group) / TREE_RATE))
        return network.launch_s + seconds

    def all_to_all_s(self, nbytes: float, group: Group) -> float:
        """Seconds of an all-to-all, in which each rank divides `nbytes` among all ranks.

        Raises:
            UsageError: as `all_gather_s`.
        """
        if group.size == 1:
            return 0.0
        network = self.machine.network
        near = group.per_node - 1
        seconds = nbytes * near / group.size / self._within if near else 0.0
        latency = math.ceil(near / PEERS_AT_ONCE) * network.node_latency_s
        if group.nodes > 1:
            self._require_network(group)
            far = group.size - group.fewest
            seconds = max(seconds, nbytes * far / group.size / self._beyond)
            latency += math.ceil(far / PEERS_AT_ONCE) * network.nic_latency_s
        return network.launch_s + latency + seconds

    def send_s(self, nbytes: float, *, beyond_node: bool) -> float:
        """Seconds until a message from one rank to another has arrived.

        Raises:
            UsageError: it goes to another node, and no network connects them.
        """
        network = self.machine.network
        if beyond_node:
            self._require_network(Group(size=2, per_node=1))
            return network.launch_s + network.nic_latency_s + nbytes / self._beyond
        return network.launch_s + network.node_latency_s + nbytes / self._within

    def host_link_bytes_per_s(self, group: Group) -> float:
        """Bytes per second in each direction that a collective of the group takes of a GPU's link to the host."""
        if group.size > 1 and group.nodes > 1:
            return self._beyond
        return self._within if group.size > 1 and self.machine.network.peers_through_pcie else 0.0

    def _ring_s(self, nbytes: float, group: Group) -> float:
        """Seconds of one way around a ring, on which each rank passes on what the others have."""
        network = self.machine.network
        steps = (group.size - group.nodes) * network.node_latency_s + (group.nodes - 1) * network.nic_latency_s
        return steps + nbytes * (group.size - 1) / group.size / self._ring_rate(group)

    def _ring_rate(self, group: Group) -> float:
        """Bytes per second that pass each rank of a ring, and leave each node over the NICs of its ranks together."""
        within = self._within if group.per_node > 1 else math.inf
        if group.nodes == 1:
            return within
        self._require_network(group)
        return min(within, group.fewest * self._beyond)

    def _require_network(self, group: Group) -> None:
        if not self.machine.network.nics_per_node:
            raise UsageError(
                f"{group.size} ranks that communicate are on {group.nodes} nodes of {self.machine.gpus_per_node} GPUs, "
                "which no network connects; name it with --net, such as --net 8x400Gb"
            )
