"""Hardware with the rates that `memo doctor --json` measured, in place of those of a preset or description.

Reads only the keys that planning needs; a report that lacks them, or holds something else, is refused in one line.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from memo.errors import PlanError
from memo.mip.inputs.hardware import Hardware
from memo.mip.strict_json import parse_json, read_as

__all__ = ["with_measured_rates"]

MAX_RATE = 1e18


def with_measured_rates(machine: Hardware, path: str | os.PathLike[str]) -> Hardware:
    """Replaces links, memories and disks by those of a doctor's report; what it did not measure stays.

    Args:
        machine: the hardware to start from.
        path: the report, as `memo doctor --json` printed it; `-` is standard input.

    Raises:
        PlanError: the file cannot be read or is no such report.
    """

    def measured(text: str) -> Hardware:
        report = parse_json(text)
        return dataclasses.replace(machine, **_gpus(_entries(report, "gpus")), **_host(report), **_disks(report))

    return read_as(path, measured)


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


def _host(report: dict[str, Any]) -> dict[str, Any]:
    host = report.get("host")
    return {"host_bytes": _whole(host, "memory_available_bytes")} if isinstance(host, dict) else {}


def _disks(report: dict[str, Any]) -> dict[str, Any]:
    """Rates of all directories striped, where that was measured; else of the first usable one."""
    usable = [disk["rates"] for disk in _entries(report, "disks") if isinstance(disk.get("rates"), dict)]
    rates = report["striped"] if isinstance(report.get("striped"), dict) else next(iter(usable), None)
    if rates is None:
        return {}
    return {
        "disk_write_bytes_per_s": _rate(rates, "write_bytes_per_s"),
        "disk_read_bytes_per_s": _rate(rates, "read_bytes_per_s"),
    }


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


def _whole(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 62:
        raise PlanError(f"{key} is not a number of bytes")
    return value
