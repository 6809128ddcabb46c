"""`memo doctor`: measures the GPU links, host memory and disks of this machine in under half a minute."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memo.errors import ExitCode, UsageError
from memo.trace import printable, rate
from memo.units import format_bytes, format_duration, parse_duration_s

if TYPE_CHECKING:
    from memo.machine import Diagnosis, Disk, DiskRates, Gpu, HostFacts

__all__ = ["configure", "run"]

_MEASURING_S = 20.0  # all measurements together, unless --seconds is given
_LONGEST_S = 1.0  # one measurement
_WIDEST = 2000  # characters of one cell: paths and reasons are shown whole


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `memo doctor`."""
    parser.add_argument(
        "--disk-dir",
        action="append",
        metavar="DIR",
        help="scratch directory whose disk is measured; repeat the option for several disks (default: the current "
        "directory)",
    )
    parser.add_argument(
        "--seconds",
        metavar="TIME",
        help="duration of each measurement, such as 500ms (default 1s; less for many disks)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with the unit in each key, instead of a table"
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Measures and prints; exit code 1 when a disk cannot be used."""
    from memo.machine import examine

    if "" in (args.disk_dir or []):
        raise UsageError("--disk-dir: an empty name is no directory; leave the option out for the current directory")
    directories = [Path(name) for name in args.disk_dir or ["."]]
    if args.seconds is None:
        seconds = min(_LONGEST_S, _MEASURING_S / (6 * (len(directories) + 1)))
    else:
        seconds = parse_duration_s(args.seconds, what="--seconds")
    diagnosis = examine(directories, seconds=seconds)
    if args.json:
        print(json.dumps(dataclasses.asdict(diagnosis), indent=2))
    else:
        _print(diagnosis)
    return ExitCode.FAILURE if any(disk.problem for disk in diagnosis.disks) else ExitCode.OK


def _print(diagnosis: Diagnosis) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(diagnosis):
        table.add_row(escape(printable(name, limit=_WIDEST)), escape(printable(text, limit=_WIDEST)))
    Console(highlight=False).print(table)


def _rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    rows = [row for gpu in diagnosis.gpus for row in _gpu_rows(gpu)]
    if diagnosis.gpu_driver_version:
        rows.append(("GPU driver", diagnosis.gpu_driver_version))
    if diagnosis.gpu_problem:
        rows.append(("GPU", diagnosis.gpu_problem))
    rows += _host_rows(diagnosis.host)
    rows += [row for disk in diagnosis.disks for row in _disk_rows(disk)]
    if diagnosis.striped is not None:
        rows += _rate_rows("striped over all", diagnosis.striped)
    return [*rows, ("measured in", format_duration(diagnosis.took_s))]


def _gpu_rows(gpu: Gpu) -> list[tuple[str, str]]:
    name = f"GPU {gpu.index}"
    node = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
    lanes = f"PCIe {gpu.pcie_generation} x{gpu.pcie_width}"
    if (gpu.pcie_generation, gpu.pcie_width) != (gpu.pcie_generation_max, gpu.pcie_width_max):
        lanes += f" (could be PCIe {gpu.pcie_generation_max} x{gpu.pcie_width_max})"
    rows = [(name, f"{gpu.name}, {format_bytes(gpu.memory_total_bytes)}, {lanes}{node}")]
    if gpu.link is not None:
        link = gpu.link
        rows += [
            (
                f"{name} to host",
                f"{rate(link.d2h_bytes_per_s)}, {rate(link.d2h_together_bytes_per_s)} both ways at once",
            ),
            (
                f"host to {name}",
                f"{rate(link.h2d_bytes_per_s)}, {rate(link.h2d_together_bytes_per_s)} both ways at once",
            ),
        ]
    return rows


def _host_rows(host: HostFacts) -> list[tuple[str, str]]:
    limit = host.memlock_limit_bytes
    return [
        ("host memory free", format_bytes(host.memory_available_bytes)),
        ("may be page-locked", "without limit" if limit is None else format_bytes(limit)),
        ("host copy", rate(host.copy_bytes_per_s)),
    ]


def _disk_rows(disk: Disk) -> list[tuple[str, str]]:
    rows = [("disk", f"{disk.directory} ({disk.file_system} on {disk.device})")]
    if disk.problem is not None:
        rows.append(("  cannot be used", disk.problem))
    if disk.free_bytes is not None:
        rows.append(("  free", format_bytes(disk.free_bytes)))
    if disk.direct_io is False:
        rows.append(("  O_DIRECT", "not here: bytes go through the page cache"))
    if disk.rates is not None:
        rows += _rate_rows(" ", disk.rates)
    rows.append(("  GPUDirect Storage", "works" if disk.gds_works else "; ".join(disk.gds_obstacles) or "not tried"))
    return rows


def _rate_rows(name: str, rates: DiskRates) -> list[tuple[str, str]]:
    return [
        (f"{name} write", f"{rate(rates.write_bytes_per_s)}, {rate(rates.write_together_bytes_per_s)} while reading"),
        (f"{name} read", f"{rate(rates.read_bytes_per_s)}, {rate(rates.read_together_bytes_per_s)} while writing"),
    ]
