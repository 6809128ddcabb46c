"""Hardware with the rates that `memo doctor --json` measured, in place of those of a preset or description.

Reads only the keys that planning needs; a report that lacks them, or holds something else, is refused in one line.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from typing import Any

from memo.errors import PlanError
from memo.mip.inputs.hardware import MEMORY_SHARE, Hardware, HeadShares
from memo.mip.inputs.network import Network
from memo.mip.strict_json import parse_json, read_as

MAX_RATE = 1e18
MAX_SECONDS = 1e6
MEASURED_KERNEL = "torch's own choice, as measured"
"""Name of the kernel of attention that `memo doctor` times."""


def with_measured_rates(machine: Hardware, path: str | os.PathLike[str]) -> Hardware:
    """Replaces links, memories, disks and the network by those of a doctor's report; what it did not measure stays.

    Args:
        machine: the hardware to start from.
        path: the report, as `memo doctor --json` printed it; `-` is standard input.

    Raises:
        PlanError: the file cannot be read or is no such report.
    """

    def read(text: str) -> Hardware:
        report = parse_json(text)
        gpus = _entries(report, "gpus")
        measured = dataclasses.replace(machine, **_gpus(gpus), **_host(report), **_disks(report))
        measured = _with_kernels(measured, [gpu["kernels"] for gpu in gpus if isinstance(gpu.get("kernels"), dict)])
        collectives = report.get("collectives")
        return measured if collectives is None else with_measured_collectives(measured, collectives)

    return read_as(path, read)


def with_measured_collectives(machine: Hardware, collectives: object) -> Hardware:
    """Replaces latencies and rates of the network by those of collectives that were measured among some ranks.

    Args:
        machine: the hardware to start from.
        collectives: `memo.machine.CollectiveRates` as JSON values.

    Raises:
        PlanError: they are none.
    """
    if not isinstance(collectives, dict):
        raise PlanError("collectives is not an object")
    for ring in _rings(collectives):
        machine = _with_rings(machine, ring)
    return machine


def _gpus(gpus: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rates of the slowest GPU's link, since ranks wait for one another."""
    links = [gpu["link"] for gpu in gpus if isinstance(gpu.get("link"), dict)]
    if not links:
        return {}
    both = [_rate(link, "d2h_together_bytes_per_s") + _rate(link, "h2d_together_bytes_per_s") for link in links]
    return {
        "d2h_bytes_per_s": min(_rate(link, "d2h_bytes_per_s") for link in links),
        "h2d_bytes_per_s": min(_rate(link, "h2d_bytes_per_s") for link in links),
        "duplex_bytes_per_s": min(both),
        "device_bytes": min(_whole(gpu, "memory_total_bytes") for gpu in gpus),
        "gpus_per_node": len(gpus),
    }


def _with_kernels(machine: Hardware, gpus: Sequence[dict[str, Any]]) -> Hardware:
    """Sets rates of kernels to the slowest GPU's; attention's are those of 16k tokens."""
    if not gpus:
        return machine
    product = min(_rate(gpu, "product_flops_per_s") for gpu in gpus)
    peak = max(machine.peak_flops, product)
    rates = [rate for gpu in gpus for rate in _entries(gpu, "attention")]
    sizes = sorted({_whole(rate, "head") for rate in rates})
    if not sizes:
        raise PlanError("kernels have no attention")
    lengths = sorted({_whole(rate, "tokens") for rate in rates})
    usual = lengths[len(lengths) // 2]

    def slowest(head: int, way: str, tokens: int) -> float:
        found = [_rate(rate, way) for rate in rates if (rate["head"], rate["tokens"]) == (head, tokens)]
        if not found:
            raise PlanError(f"attention with heads of {head} was not measured at {tokens} tokens")
        return min(found)

    heads = [
        HeadShares(head, *(slowest(head, f"{way}_flops_per_s", usual) / peak for way in ("forward", "backward")))
        for head in sizes
    ]
    return dataclasses.replace(
        machine,
        peak_flops=peak,
        matmul_efficiency=product / peak,
        hbm_bytes_per_s=min(_rate(gpu, "copy_bytes_per_s") for gpu in gpus) / MEMORY_SHARE,
        launch_s=max(_seconds(gpu, "launch_s") for gpu in gpus),
        attention=(dataclasses.replace(machine.attention[0], name=MEASURED_KERNEL, heads=tuple(heads)),),
    )


def _host(report: dict[str, Any]) -> dict[str, Any]:
    host = report.get("host")
    return {"host_bytes": _whole(host, "memory_available_bytes")} if isinstance(host, dict) else {}


def _disks(report: dict[str, Any]) -> dict[str, Any]:
    """Rates of all directories striped, where that was measured; else of the first usable one.

    Of writes at most the steady rate of a sustained write.
    """
    usable = [disk["rates"] for disk in _entries(report, "disks") if isinstance(disk.get("rates"), dict)]
    rates = report["striped"] if isinstance(report.get("striped"), dict) else next(iter(usable), None)
    if rates is None:
        return {}
    write, sustained = _rate(rates, "write_bytes_per_s"), report.get("sustained")
    if isinstance(sustained, dict):
        write = min(write, _rate(sustained, "steady_bytes_per_s"))
    return {
        "disk_write_bytes_per_s": write,
        "disk_read_bytes_per_s": _rate(rates, "read_bytes_per_s"),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """All-gather and reduce-scatter among some ranks, as one: rings of the same steps and bytes."""

    ranks: int
    nodes: int
    ranks_per_node: int
    fewest: int
    latency_s: float
    passed_bytes_per_s: float | None
    """Bytes that pass each rank in a second; None: no size was so large that its bytes took longer than its steps."""
    message_s: float | None
    """Latency of a message from one rank to another."""


def _rings(collectives: dict[str, Any]) -> list[_Ring]:
    """Rings within a node, then of all nodes, as far as they were measured."""
    fits = _entries(collectives, "fits")
    places = [[fit for fit in fits if fit.get("within_node") is within] for within in (True, False)]
    return [ring for place in places if (ring := _ring(place)) is not None]


def _ring(fits: Sequence[dict[str, Any]]) -> _Ring | None:
    rings = [fit for fit in fits if fit.get("collective") in ("all_gather", "reduce_scatter")]
    if not rings:
        return None
    ranks, nodes, most, fewest = (
        _whole(rings[0], key) for key in ("ranks", "nodes", "ranks_per_node", "fewest_ranks_per_node")
    )
    if not (nodes <= ranks and fewest <= most <= ranks <= nodes * most) or ranks < 2:
        raise PlanError(f"collectives: {ranks} ranks on {nodes} nodes, {fewest} to {most} on each")
    known = [rate for fit in rings if (rate := _known_rate(fit)) is not None]
    messages = [_seconds(fit, "latency_s") for fit in fits if fit.get("collective") == "send"]
    return _Ring(
        ranks=ranks,
        nodes=nodes,
        ranks_per_node=most,
        fewest=fewest,
        latency_s=statistics.fmean(_seconds(fit, "latency_s") for fit in rings),
        passed_bytes_per_s=statistics.harmonic_mean(known) * (ranks - 1) / ranks if known else None,
        message_s=messages[0] if messages else None,
    )


def _known_rate(fit: dict[str, Any]) -> float | None:
    """The fitted rate, unless the largest message was too small to tell it."""
    rate, latency = _rate(fit, "bytes_per_s"), _seconds(fit, "latency_s")
    largest = max((_whole(entry, "message_bytes") for entry in _entries(fit, "times")), default=0)
    return rate if largest / rate > latency else None


def _with_rings(machine: Hardware, ring: _Ring) -> Hardware:
    """Sets latencies and rates so that `Collectives` gives the ring's times."""
    if ring.nodes == 1:
        return _with_ring_in_node(machine, ring)
    network = machine.network
    steps = ring.ranks - ring.nodes
    beside = network.launch_s + steps * network.node_latency_s
    changes: dict[str, Any] = {"nic_latency_s": max(ring.latency_s - beside, 0) / (ring.nodes - 1)}
    if ring.passed_bytes_per_s is not None:
        # Of a whole node: the ring leaves the node with fewest ranks over their part of its NICs.
        reached = ring.passed_bytes_per_s / ring.fewest * ring.ranks_per_node
        nics = network.nics_per_node or ring.ranks_per_node
        line = network.nic_bytes_per_s or reached / nics
        efficiency = reached * network.oversubscription / (nics * line)
        changes |= {
            "nics_per_node": nics,
            "nic_bytes_per_s": line * max(efficiency, 1),
            "nic_efficiency": min(efficiency, 1),
        }
    return dataclasses.replace(machine, network=dataclasses.replace(network, **changes))


def _with_ring_in_node(machine: Hardware, ring: _Ring) -> Hardware:
    # Two unknowns, the launch and a step: the ring takes a launch and ranks - 1 steps, a message a launch and one step.
    step, steps = machine.network.node_latency_s, ring.ranks - 1
    if ring.message_s is not None and steps > 1:
        step = max(ring.latency_s - ring.message_s, 0) / (steps - 1)
    step = min(step, ring.latency_s / steps)
    changes: dict[str, Any] = {"node_latency_s": step, "launch_s": max(ring.latency_s - steps * step, 0)}
    line = machine.nvlink_bytes_per_s
    if ring.passed_bytes_per_s is not None:
        line = max(line, ring.passed_bytes_per_s)
        changes["node_efficiency"] = ring.passed_bytes_per_s / line
    network: Network = dataclasses.replace(machine.network, **changes)
    return dataclasses.replace(machine, nvlink_bytes_per_s=line, network=network)


def _entries(report: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = report.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PlanError(f"it has no list of {key}: is it what memo doctor --json printed?")
    return entries


def _rate(entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_RATE:
        raise PlanError(f"{key} is not a rate")
    return float(value)


def _seconds(entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < MAX_SECONDS:
        raise PlanError(f"{key} is not a time")
    return float(value)


def _whole(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 62:
        raise PlanError(f"{key} is not a number of bytes")
    return value
