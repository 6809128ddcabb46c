"""`cluster.json`: the groups of nodes of a cluster and their links, read strictly.

Owns the format of docs/activation-plan.md, "Clusters that are not uniform". GPUs are presets by name or files of
`memo-hardware`; sizes are texts such as `80GiB`, NICs texts such as `8x400Gb`, as on the command line.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from memo.errors import PlanError, UsageError
from memo.mip.activation import read_hardware
from memo.mip.cluster.cluster import Cluster, Connection, NodeGroup
from memo.mip.inputs import Hardware, Network, NetworkLevel, hardware_preset, parse_network
from memo.mip.strict_json import decode, parse_json, read_as, require_format
from memo.units import parse_bytes

CLUSTER_FORMAT, VERSION = "memo-cluster", 1
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LevelEntry:
    name: str
    nodes: int
    """Nodes of a unit."""
    net: str | None = None
    """NICs of a node that leave the unit; without it the node's own."""
    efficiency: float | None = None
    oversubscription: float = 1.0
    latency_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _GroupEntry:
    name: str
    gpu: str
    """A preset, or the path of a memo-hardware file, from the cluster file's folder."""
    nodes: int
    gpus_per_node: int | None = None
    device: str | None = None
    host: str | None = None
    """Host memory of a node."""
    disk: str | None = None
    """Disk space of a node; without it there is none."""
    net: str | None = None
    """NICs of a node; without it those of the GPU's description."""
    nic_latency_s: float | None = None
    nic_efficiency: float | None = None
    oversubscription: float | None = None
    levels: tuple[_LevelEntry, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _LinkEntry:
    between: tuple[str, str]
    net: str
    """NICs of each node."""
    latency_s: float = 50e-6
    """A step over TCP between two switches; RDMA takes less."""
    efficiency: float = 0.8
    oversubscription: float = 1.0
    trunk: str | None = None
    """All that connects the groups, such as 4x100Gb."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterEntry:
    groups: tuple[_GroupEntry, ...]
    links: tuple[_LinkEntry, ...] = ()


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Reads a cluster file.

    Raises:
        PlanError: the file, or a hardware file that it names, cannot be read or is not in the format; one line that names
            the key.
    """
    folder = Path(path).parent if os.fspath(path) != "-" else Path()
    return read_as(path, lambda text: cluster_from_json(text, folder=folder))


def cluster_from_json(text: str, *, folder: Path | None = None) -> Cluster:
    """Parses a cluster.

    Args:
        text: the file's.
        folder: where paths of hardware files begin.

    Raises:
        PlanError: as `read_cluster`.
    """
    root = parse_json(text)
    require_format(root, CLUSTER_FORMAT, version=VERSION)
    entry = decode(_ClusterEntry, root, "the file", ignore=("format", "version"))
    groups = tuple(_group(one, folder or Path()) for one in entry.groups)
    return Cluster(groups=groups, connections=tuple(_connection(one) for one in entry.links))


def _group(entry: _GroupEntry, folder: Path) -> NodeGroup:
    where = f"group {entry.name[:40]!r}"
    machine = _machine(entry, where, folder)
    if entry.gpus_per_node is not None and entry.gpus_per_node < 1:
        raise PlanError(f"{where}: gpus_per_node is {entry.gpus_per_node}, not a number of 1 or more")
    network = _network(entry, machine.network, where)
    changed: dict[str, Any] = {
        "gpus_per_node": entry.gpus_per_node,
        "device_bytes": _size(entry.device, f"{where}: device"),
        "host_bytes": _size(entry.host, f"{where}: host"),
    }
    machine = dataclasses.replace(
        machine, network=network, **{name: value for name, value in changed.items() if value is not None}
    )
    if not machine.device_bytes:
        raise PlanError(f"{where}: device is 0 bytes")
    disk = _size(entry.disk, f"{where}: disk") or 0
    return NodeGroup(name=entry.name, machine=machine, nodes=entry.nodes, disk_bytes=disk)


def _machine(entry: _GroupEntry, where: str, folder: Path) -> Hardware:
    if entry.gpu.endswith(".json") or "/" in entry.gpu:
        return read_hardware(folder / entry.gpu)
    return _at(f"{where}: gpu", lambda: hardware_preset(entry.gpu))


def _network(entry: _GroupEntry, base: Network, where: str) -> Network:
    net = entry.net
    if net is not None:
        base = _nics(net, base, f"{where}: net")
    given = {name: getattr(entry, name) for name in ("nic_latency_s", "nic_efficiency", "oversubscription")}
    changes = {name: value for name, value in given.items() if value is not None}
    levels = tuple(_level(level, f"{where}: level {level.name[:40]!r}", base) for level in entry.levels)
    return _at(where, lambda: dataclasses.replace(base, **changes, levels=levels))


def _level(entry: _LevelEntry, where: str, base: Network) -> NetworkLevel:
    if entry.nodes < 2:
        raise PlanError(f"{where}: nodes is {entry.nodes}; a unit has at least 2")
    nics = Network() if entry.net is None else _nics(entry.net, base, f"{where}: net")
    if entry.net is None and entry.efficiency is not None:
        raise PlanError(f"{where}: efficiency needs net; the node's NICs have nic_efficiency")
    return NetworkLevel(
        name=entry.name,
        nodes=entry.nodes,
        nics_per_node=nics.nics_per_node,
        nic_bytes_per_s=nics.nic_bytes_per_s,
        efficiency=base.nic_efficiency if entry.efficiency is None else entry.efficiency,
        oversubscription=entry.oversubscription,
        latency_s=entry.latency_s,
    )


def _connection(entry: _LinkEntry) -> Connection:
    where = f"link between {entry.between[0][:40]!r} and {entry.between[1][:40]!r}"
    nics = _nics(entry.net, Network(), f"{where}: net")
    links = _at(
        where,
        lambda: NetworkLevel(
            name="between groups",
            nics_per_node=nics.nics_per_node,
            nic_bytes_per_s=nics.nic_bytes_per_s,
            efficiency=entry.efficiency,
            oversubscription=entry.oversubscription,
            latency_s=entry.latency_s,
        ),
    )
    rate = 0.0
    if entry.trunk is not None:  # a rate such as 100Gb, or several as NICs are given
        text = entry.trunk if "x" in entry.trunk.lower() else f"1x{entry.trunk}"
        trunk = _nics(text, Network(), f"{where}: trunk")
        rate = trunk.nics_per_node * trunk.nic_bytes_per_s
    return Connection(between=entry.between, links=links, trunk_bytes_per_s=rate)


def _nics(text: str, base: Network, where: str) -> Network:
    return _at(where, lambda: parse_network(text, base))


def _size(text: str | None, where: str) -> int | None:
    return None if text is None else _at("", lambda: parse_bytes(text, what=where))


def _at(where: str, make: Callable[[], T]) -> T:
    """The value, or a PlanError that names the entry or the key, instead of a flag."""
    try:
        return make()
    except (PlanError, UsageError) as error:
        raise PlanError(f"{where}{': ' if where else ''}{str(error).removeprefix('--net ')}") from None
