"""`memo doctor`: measures the GPU links, host memory and disks of this machine in under half a minute.

Started by torchrun, as many ranks, it measures collectives among them first; the rest is measured by the first rank
alone, which prints the report.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from memo.cli.inputs.flag_types import Flag, Json, Size
from memo.cli.terminal.output_files import display_name
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, UsageError
from memo.installation import conflict
from memo.trace import duration, printable, rate
from memo.units import format_bytes, format_duration, format_tokens, parse_duration_s, text_table

if TYPE_CHECKING:
    from memo.machine import (
        CollectiveFit,
        CollectiveRates,
        Diagnosis,
        DiskRates,
        Gpu,
        HostFacts,
        MeasuredDisk,
        SustainedWrite,
    )

_MEASURING_S = 20.0  # all measurements together, unless --seconds is given
_LONGEST_S = 1.0  # one measurement
EPILOG = """\
collectives of the GPUs of two nodes, for memo plan --doctor; on each node:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m memo.cli.main doctor --json
"""
_WIDEST = 2000  # characters of one cell: paths and reasons are shown whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `memo doctor`."""

    disk: Annotated[Sequence[str], Flag(type=str, action="append", metavar="DIR")] = (".",)
    """Scratch directory whose disk is measured; repeat the option for several disks (default: the current directory)."""
    seconds: Annotated[float | None, Flag(type=parse_duration_s, metavar="TIME")] = None
    """Duration of each measurement, such as 500ms (default 1s; less for many disks)."""
    disk_sustained: Size | None = None
    """Also write this many bytes to all disks without a pause, such as 200GiB, to find where a drive's cache ends; it wears
    them by as much."""
    json: Annotated[Json, Flag(help="print one JSON object, with the unit in each key, instead of a table")] = False


def run(args: Options) -> ExitCode:
    """Measures and prints, on the first rank; exit code 1 when a disk cannot be used."""
    from memo.machine import examine

    if "" in args.disk:
        raise UsageError("--disk: an empty name is no directory; leave the option out for the current directory")
    directories = [Path(name) for name in args.disk]
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"--disk: {display_name(directory)} is no directory; give one that exists")
    seconds = args.seconds or min(_LONGEST_S, _MEASURING_S / (6 * (len(directories) + 1)))
    begin = time.monotonic()
    collectives = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with WaitingLine("memo doctor", "measuring collectives of all ranks", quiet=args.json):
            collectives = _collectives(seconds)
    if int(os.environ.get("RANK", "0")) > 0:
        return ExitCode.OK
    spent = time.monotonic() - begin
    with WaitingLine("memo doctor", "measuring links, host memory and disks", quiet=args.json):
        diagnosis = examine(directories, seconds=seconds, sustained_bytes=args.disk_sustained or 0)
    diagnosis = dataclasses.replace(diagnosis, collectives=collectives, took_s=round(diagnosis.took_s + spent, 3))
    if args.json:
        print(json.dumps(dataclasses.asdict(diagnosis), indent=2))
    else:
        _print(diagnosis)
    return ExitCode.FAILURE if any(disk.problem for disk in diagnosis.disks) else ExitCode.OK


def _collectives(seconds: float) -> CollectiveRates:
    """Measures collectives among the ranks that torchrun started: on GPUs if each rank of a node has one."""
    import torch

    from memo.machine import measure_collectives
    from memo.parallel import join

    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    with join(device):
        return measure_collectives(device, seconds=seconds)


def _print(diagnosis: Diagnosis) -> None:
    first, *rows = [(printable(name, limit=_WIDEST), printable(text, limit=_WIDEST)) for name, text in _rows(diagnosis)]
    print(text_table(first, rows, left=(0, 1)))


def _rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    wrong = conflict()
    rows = [] if wrong is None else [("package", wrong)]
    rows += [row for gpu in diagnosis.gpus for row in _gpu_rows(gpu)]
    if diagnosis.gpu_driver_version:
        rows.append(("GPU driver", diagnosis.gpu_driver_version))
    if diagnosis.gpu_problem:
        rows.append(("GPU", diagnosis.gpu_problem))
    rows += _host_rows(diagnosis.host)
    rows += [row for disk in diagnosis.disks for row in _disk_rows(disk, has_gpu=bool(diagnosis.gpus))]
    if diagnosis.striped is not None:
        rows += _rate_rows("striped over all", diagnosis.striped)
    if diagnosis.sustained is not None:
        rows.append(_sustained_row(diagnosis.sustained))
    if diagnosis.collectives is not None:
        rows += _collective_rows(diagnosis.collectives)
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
    if gpu.kernels is not None:
        kernels = gpu.kernels
        product = f"matrix product {kernels.product_flops_per_s / 1e12:.0f} TFLOP/s"
        copy = f"copy {rate(kernels.copy_bytes_per_s)}, read and written"
        rows.append((f"{name} kernels", f"{product}, {copy}, launch {duration(kernels.launch_s * 1e9)}"))
        for one in kernels.attention:
            both = (
                f"{one.forward_flops_per_s / 1e12:.0f} forward, {one.backward_flops_per_s / 1e12:.0f} backward TFLOP/s"
            )
            rows.append((f"  attention, heads of {one.head}", f"{both} at {format_tokens(one.tokens)} tokens"))
    return rows


def _host_rows(host: HostFacts) -> list[tuple[str, str]]:
    rows = [("host memory free", format_bytes(host.memory_available_bytes))]
    for user in host.users:
        locked = f", {format_bytes(user.locked_bytes)} of it locked" if user.locked_bytes else ""
        rows.append(("  held", f"{format_bytes(user.held_bytes)} by {user.command}, process {user.pid}{locked}"))
    return [*rows, ("host copy", rate(host.copy_bytes_per_s))]


def _disk_rows(disk: MeasuredDisk, *, has_gpu: bool) -> list[tuple[str, str]]:
    rows = [("disk", f"{disk.directory} ({disk.file_system} on {disk.device})")]
    if disk.problem is not None:
        rows.append(("  cannot be used", disk.problem))
    if disk.free_bytes is not None:
        rows.append(("  free", format_bytes(disk.free_bytes)))
    if disk.direct_io is False:
        rows.append(("  O_DIRECT", "not here: bytes go through the page cache"))
    if disk.rates is not None:
        rows += _rate_rows(" ", disk.rates)
    obstacles = "; ".join(disk.gds_obstacles) or "not tried"
    rows.append(("  GPUDirect Storage", "works" if disk.gds_works else obstacles if has_gpu else "no GPU"))
    return rows


def _collective_rows(rates: CollectiveRates) -> list[tuple[str, str]]:
    rows = [("collectives", f"{rates.world_size} ranks, {rates.backend}")]
    for fit in rates.fits:
        place = "in a node" if fit.within_node else "of all"
        rows.append((f"  {fit.collective.replace('_', '-')} {place}", _line_of(fit)))
    return [*rows, *(("  not measured", problem) for problem in rates.problems)]


def _line_of(fit: CollectiveFit) -> str:
    ranks = f"{fit.ranks} ranks" if fit.nodes == 1 else f"{fit.ranks} ranks on {fit.nodes} nodes"
    sizes = f"{format_bytes(fit.times[0].message_bytes)} to {format_bytes(fit.times[-1].message_bytes)}"
    line = f"{duration(fit.latency_s * 1e9)} + bytes / {rate(fit.bytes_per_s)}"
    return f"{line} among {ranks}, {sizes}, off by {fit.typical_error:.0%}, at most {fit.largest_error:.0%}"


def _rate_rows(name: str, rates: DiskRates) -> list[tuple[str, str]]:
    return [
        (f"{name} write", f"{rate(rates.write_bytes_per_s)}, {rate(rates.write_together_bytes_per_s)} while reading"),
        (f"{name} read", f"{rate(rates.read_bytes_per_s)}, {rate(rates.read_together_bytes_per_s)} while writing"),
    ]


def _sustained_row(found: SustainedWrite) -> tuple[str, str]:
    text = rate(found.steady_bytes_per_s)
    if found.fell_after_bytes is None:
        text += f" over {format_bytes(found.written_bytes)}, no fall"
    else:
        text += f" after {format_bytes(found.fell_after_bytes)}, {rate(found.first_bytes_per_s)} before"
    again = found.written_bytes - found.scratch_bytes
    return "sustained write", text + (f" ({format_bytes(again)} of it over the same blocks)" if again else "")
