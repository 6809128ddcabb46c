"""Network of a cluster: links between the GPUs of a node and between nodes, and the time of a collective over them.

Owns the alpha-beta model: a collective takes the time of its launch, a latency for each of its steps, and the time of
its bytes over the slowest link that they cross. Within a node that is the GPU's link to its peers, between nodes the
GPU's part of the node's NICs, since all GPUs of a node communicate at the same time. NVLink SHARP is not assumed.
Rates and latencies are of `Hardware`. Above the nodes there may be levels: units of several nodes, whose links to other
units are slower than the NICs; the slowest level that a group crosses counts, at each level with the ranks of one unit.

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
    from collections.abc import Iterator, Sequence

    from memo.mip.inputs.hardware import Hardware

GIGABIT = 1e9 / 8
TREE_STEP = 2.1
"""Latency of a tree's step between nodes in steps of a ring: 8.5 us to 4.0 us in NCCL's tuning.cc, LL128."""
TREE_RATE = 0.9
"""Fraction of a ring's rate that a tree reaches (NCCL's tuning.cc)."""
PEERS_AT_ONCE = 8
"""Messages of an all-to-all that a rank has under way together (NCCL's NCCL_MAX_DEV_WORK_P2P_PER_BATCH)."""
_SPELLED = re.compile(r"(?P<count>[1-9]\d{0,3})[xX](?P<rate>\d{1,9}(\.\d{1,9})?)(?P<unit>gb|gB|Gb|GB)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLevel:
    """A level above the nodes: units of several nodes, and the links of each node that leave its unit.

    Units are for instance the nodes whose equal rails share a switch, pods, or groups of nodes of a cluster that other
    NICs connect.
    """

    name: str
    nodes: int = 0
    """Nodes of a unit, filled one after the other; 0: units are the groups of nodes that replicas are divided over."""
    nics_per_node: int = 0
    """NICs of a node that leave its unit; 0: the node's own, with their rate and efficiency."""
    nic_bytes_per_s: float = 0.0
    """Line rate of one of them in one direction."""
    efficiency: float = 0.9
    """Fraction of the line rate that collectives of large messages reach."""
    oversubscription: float = 1.0
    """Factor by which switches between units carry less than these NICs send."""
    latency_s: float = 0.0
    """Time of a step of a ring from one unit to another, without bytes; at least the NICs'."""

    def __post_init__(self) -> None:
        where = f"level {self.name[:40]!r}"
        check_amounts(self, where)
        if bool(self.nics_per_node) != (self.nic_bytes_per_s > 0):
            raise PlanError(f"{where}: {self.nics_per_node} NICs of {self.nic_bytes_per_s:g} bytes/s")
        if not (0 < self.efficiency <= 1 and self.oversubscription >= 1):
            raise PlanError(f"{where}: an efficiency is above 0 and at most 1, and oversubscription is at least 1")

    @property
    def node_bytes_per_s(self) -> float:
        """Bytes per second of a node over these NICs; 0 where they are the node's own."""
        return self.nics_per_node * self.nic_bytes_per_s * self.efficiency / self.oversubscription


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
    levels: tuple[NetworkLevel, ...] = ()
    """Above the nodes, from the smallest units on; one of groups of nodes comes last."""

    def __post_init__(self) -> None:
        check_amounts(self, "network")
        sizes = [level.nodes or math.inf for level in self.levels]
        if any(larger <= size for size, larger in itertools.pairwise(sizes)) or 1 in sizes:
            raise PlanError("network: units of a level have several nodes, and more than those of the level before")
        if bool(self.nics_per_node) != (self.nic_bytes_per_s > 0):
            raise PlanError(f"network: {self.nics_per_node} NICs of {self.nic_bytes_per_s:g} bytes/s")
        if not (0 < self.nic_efficiency <= 1 and 0 < self.node_efficiency <= 1 and self.oversubscription >= 1):
            raise PlanError("network: efficiencies are above 0 and at most 1, and oversubscription is at least 1")

    @property
    def node_bytes_per_s(self) -> float:
        """Bytes per second of a node over its NICs."""
        return self.nics_per_node * self.nic_bytes_per_s * self.nic_efficiency / self.oversubscription

    def unit_bytes_per_s(self, level: NetworkLevel) -> float:
        """Bytes per second of a node over the NICs that leave a level's unit."""
        if level.nics_per_node:
            return level.node_bytes_per_s
        return self.nics_per_node * self.nic_bytes_per_s * self.nic_efficiency / level.oversubscription


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
class RankGroup:
    """Ranks of one collective."""

    size: int
    per_node: int
    """Number of these ranks on the node that has most of them."""
    fewest: int = 0
    """Number of these ranks on the node that has fewest; 0: what is left where other nodes have `per_node`."""
    nodes: int = 0
    """Number of nodes that the ranks are on; 0: as few as `per_node` allows."""
    stride: int = 0
    """Difference of the numbers of neighbours, where they are known; 0: the ranks fill nodes that follow one another."""
    gpus: int = 0
    """Number of all ranks that are divided into such groups, if known."""
    parts: tuple[RankGroup, ...] = dataclasses.field(default=(), repr=False)
    """Its ranks in each group of nodes, where it is divided over several."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_node <= self.size:
            raise PlanError(f"a group of {self.size} ranks with {self.per_node} on a node")
        nodes = self.nodes or -(-self.size // self.per_node)
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "fewest", self.fewest or max(self.size - (nodes - 1) * self.per_node, 1))

    @classmethod
    def of(cls, size: int, *, stride: int, gpus_per_node: int, gpus: int = 0) -> RankGroup:
        """Group of `size` ranks whose numbers are `stride` apart, on nodes filled one after the other.

        Args:
            size: number of its ranks.
            stride: difference of the numbers of neighbours.
            gpus_per_node: GPUs of a node.
            gpus: number of all ranks, which are divided into such groups; the result is the one with the slowest links,
                since ranks wait for one another. 0: only the groups of the first `size * stride` ranks.
        """
        return _slowest_group(size, stride, gpus_per_node, max(gpus, size * stride))

    @classmethod
    def across(cls, parts: Sequence[RankGroup]) -> RankGroup:
        """Group of the ranks of several groups, each in a group of nodes of its own."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            size=sum(part.size for part in parts),
            per_node=max(part.per_node for part in parts),
            fewest=min(part.fewest for part in parts),
            nodes=sum(part.nodes for part in parts),
            parts=tuple(parts),
        )

    def over(self, level: NetworkLevel, gpus_per_node: int) -> RankGroup:
        """Returns the ranks with the units of a level in the place of nodes; of one part, if the units are of nodes."""
        if not level.nodes:
            sizes = [part.size for part in self.parts] or [self.size]
            return RankGroup(size=self.size, per_node=max(sizes), fewest=min(sizes), nodes=len(sizes))
        if self.stride:
            return _slowest_group(self.size, self.stride, level.nodes * gpus_per_node, self.gpus)
        units = -(-self.nodes // level.nodes)
        return RankGroup(
            size=self.size,
            per_node=min(self.size, self.per_node * level.nodes),
            fewest=self.fewest if units > 1 else 0,
            nodes=units,
        )


@functools.lru_cache(maxsize=4096)
def _slowest_group(size: int, stride: int, gpus_per_node: int, gpus: int) -> RankGroup:
    block = size * stride
    # Groups that start at the same place of a node are divided alike, so there are at most `gpus_per_node` kinds.
    blocks = min(gpus // block, gpus_per_node // math.gcd(block, gpus_per_node))
    starts = {
        (number * block + first) % gpus_per_node
        for number in range(blocks)
        for first in range(min(stride, gpus_per_node))
    }
    groups = [_group_from(start, size, stride, gpus_per_node, gpus) for start in sorted(starts)]
    return max(groups, key=lambda group: (group.nodes > 1, -group.fewest, group.nodes, -group.per_node))


def _group_from(start: int, size: int, stride: int, gpus_per_node: int, gpus: int) -> RankGroup:
    if stride >= gpus_per_node:
        return RankGroup(size=size, per_node=1, stride=stride, gpus=gpus)
    ends = range(0, start + size * stride + gpus_per_node, gpus_per_node)
    before = [min(max(-(-(end - start) // stride), 0), size) for end in ends]  # ranks on nodes that end before it
    counts = [after - count for count, after in itertools.pairwise(before) if after > count]
    return RankGroup(size=size, per_node=max(counts), fewest=min(counts), nodes=len(counts), stride=stride, gpus=gpus)


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
        return self.machine.network.node_bytes_per_s / self.machine.gpus_per_node

    def _beyond_unit(self, level: NetworkLevel) -> float:
        """Bytes per second of a GPU's part of the NICs that leave a level's unit."""
        return self.machine.network.unit_bytes_per_s(level) / self.machine.gpus_per_node

    def _crossed(self, group: RankGroup) -> Iterator[tuple[NetworkLevel, RankGroup, float]]:
        """Levels that a group crosses, its ranks by their units, and a step's seconds beyond one over the NICs."""
        network = self.machine.network
        for level in network.levels:
            for part in _on_nodes(group) if level.nodes else (group,):
                units = part.over(level, self.machine.gpus_per_node)
                if units.nodes > 1:
                    yield level, units, max(level.latency_s - network.nic_latency_s, 0.0)

    def all_gather_s(self, nbytes: float, group: RankGroup) -> float:
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

    def all_reduce_s(self, nbytes: float, group: RankGroup) -> float:
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
            for _, units, later_s in self._crossed(group):
                between += math.ceil(math.log2(units.nodes)) * TREE_STEP * later_s
            seconds = min(seconds, 2 * (within + between + nbytes / self._ring_rate(group) / TREE_RATE))
        return network.launch_s + seconds

    def all_to_all_s(self, nbytes: float, group: RankGroup) -> float:
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
            far = group.size - group.fewest
            if self._on_network(group):
                seconds = max(seconds, nbytes * far / group.size / self._beyond)
            latency += math.ceil(far / PEERS_AT_ONCE) * network.nic_latency_s
            for level, units, later_s in self._crossed(group):
                far = group.size - units.fewest
                seconds = max(seconds, nbytes * far / group.size / self._beyond_unit(level))
                latency += math.ceil(far / PEERS_AT_ONCE) * later_s
        return network.launch_s + latency + seconds

    def send_s(self, nbytes: float, *, beyond_node: bool, gpus: int = 0) -> float:
        """Seconds until a message from one rank to another has arrived.

        Args:
            nbytes: its size.
            beyond_node: whether the other rank is on another node.
            gpus: number of all ranks; the message may have to leave each unit that has fewer.

        Raises:
            UsageError: it goes to another node, and no network connects them.
        """
        network = self.machine.network
        if beyond_node:
            self._on_network(RankGroup(size=2, per_node=1))
            rate, latency_s = self._beyond, network.nic_latency_s
            for level in network.levels:
                if gpus > level.nodes * self.machine.gpus_per_node > 0:
                    rate, latency_s = min(rate, self._beyond_unit(level)), max(latency_s, level.latency_s)
            return network.launch_s + latency_s + nbytes / rate
        return network.launch_s + network.node_latency_s + nbytes / self._within

    def host_link_bytes_per_s(self, group: RankGroup) -> float:
        """Bytes per second in each direction that a collective of the group takes of a GPU's link to the host."""
        if group.size > 1 and group.nodes > 1:
            return self._beyond if _on_nodes(group) else self._ring_rate(group) / group.fewest
        return self._within if group.size > 1 and self.machine.network.peers_through_pcie else 0.0

    def _ring_s(self, nbytes: float, group: RankGroup) -> float:
        """Seconds of one way around a ring, on which each rank passes on what the others have."""
        network = self.machine.network
        steps = (group.size - group.nodes) * network.node_latency_s + (group.nodes - 1) * network.nic_latency_s
        steps += sum((units.nodes - 1) * later_s for _, units, later_s in self._crossed(group))
        return steps + nbytes * (group.size - 1) / group.size / self._ring_rate(group)

    def _ring_rate(self, group: RankGroup) -> float:
        """Bytes per second that pass each rank of a ring, and leave each node over the NICs of its ranks together."""
        within = self._within if group.per_node > 1 else math.inf
        if group.nodes == 1:
            return within
        rates = [part.fewest * self._beyond for part in self._on_network(group)]
        rates += [units.fewest * self._beyond_unit(level) for level, units, _ in self._crossed(group)]
        return min(within, *rates)

    def _on_network(self, group: RankGroup) -> list[RankGroup]:
        """Parts of a group that the nodes' NICs connect.

        Raises:
            UsageError: there are none.
        """
        found = _on_nodes(group)
        if found and not self.machine.network.nics_per_node:
            part = found[0]
            raise UsageError(
                f"{part.size} ranks that communicate are on {part.nodes} nodes of {self.machine.gpus_per_node} GPUs, "
                "which no network connects; name it with --net, such as --net 8x400Gb"
            )
        return found


def _on_nodes(group: RankGroup) -> list[RankGroup]:
    """Parts of a group that are on several nodes; of one that is not divided, itself."""
    return [part for part in group.parts or (group,) if part.nodes > 1]
