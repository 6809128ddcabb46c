"""What this machine can do: GPUs and their links, host memory, disks and whether they reach the GPU directly.

Everything here is measured or read from the system, never assumed; what cannot be had is said with its reason. The
planner uses the rates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memo.errors import SwapError
from memo.machine.link_bandwidth import DiskRates, HostFacts, LinkRates, host_facts, measure_disk, measure_link
from memo.swap.disk import RawFile, mount_of, obstacles, try_gds

__all__ = ["Diagnosis", "Disk", "Gpu", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML describes it, and its measured link."""

    index: int
    name: str
    memory_total_bytes: int
    pcie_generation: int
    pcie_generation_max: int
    pcie_width: int
    pcie_width_max: int
    numa_node: int | None
    link: LinkRates | None
    """None when torch cannot use the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One directory; its rates are None when `problem` says why."""

    directory: str
    device: str
    file_system: str
    mount_options: str
    free_bytes: int | None
    direct_io: bool | None
    rates: DiskRates | None
    problem: str | None
    gds_works: bool
    gds_obstacles: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything, as `memo doctor --json` prints it."""

    gpu_driver_version: str | None
    gpus: list[Gpu]
    gpu_problem: str | None
    """Why there is no GPU, or why its link could not be measured."""
    host: HostFacts
    disks: list[Disk]
    striped: DiskRates | None
    """All directories as one store; None for fewer than two."""
    took_s: float


def examine(directories: Sequence[Path], *, seconds: float, nvml: Any = None) -> Diagnosis:
    """Measures for about `seconds` at a time: one for the host, six for each disk, three for each GPU."""
    begin = time.monotonic()
    driver, gpus, problem = _gpus(nvml, seconds)
    disks = [_disk(directory, seconds) for directory in directories]
    striped = None
    if len(disks) > 1 and not any(disk.problem for disk in disks):
        striped = measure_disk(directories, seconds=seconds)
    return Diagnosis(
        gpu_driver_version=driver,
        gpus=gpus,
        gpu_problem=problem,
        host=host_facts(seconds=seconds),
        disks=disks,
        striped=striped,
        took_s=round(time.monotonic() - begin, 3),
    )


def _disk(directory: Path, seconds: float) -> Disk:
    mount = mount_of(directory)
    free: int | None = None
    direct: bool | None = None
    rates: DiskRates | None = None
    problem: str | None = None
    try:
        file = RawFile(directory)
        free, direct = file.free_bytes(), file.direct
        file.close()
        rates = measure_disk([directory], seconds=seconds)
    except SwapError as error:
        problem = str(error)
    hindrances: list[str] = []
    if problem is None:
        hindrances = obstacles(directory) or try_gds(directory)
    return Disk(
        directory=str(directory),
        device=mount.source,
        file_system=mount.kind,
        mount_options=mount.options,
        free_bytes=free,
        direct_io=direct,
        rates=rates,
        problem=problem,
        gds_works=problem is None and not hindrances,
        gds_obstacles=hindrances,
    )


def _gpus(nvml: Any, seconds: float) -> tuple[str | None, list[Gpu], str | None]:
    """(driver version, GPUs, what is wrong)."""
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, [], f"no NVIDIA driver: {error}"
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        problem = None
        if not torch.cuda.is_available():
            problem = f"torch {torch.__version__} cannot use the GPU: links are not measured"
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return driver, [_gpu(nvml, index, handle, seconds) for index, handle in enumerate(handles)], problem
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handle: Any, seconds: float) -> Gpu:
    bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        # Read after the link was used: an idle link is clocked down.
        link=_link(bus, seconds),
        pcie_generation=int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        pcie_generation_max=int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        pcie_width=int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        pcie_width_max=int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        numa_node=_numa_node(bus),
    )


def _link(bus: str, seconds: float) -> LinkRates | None:
    """Measured on torch's device at the same bus address: CUDA_VISIBLE_DEVICES renumbers torch's, not NVML's."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties: Any = torch.cuda.get_device_properties(index)
        address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
        if bus.lower().startswith(address):
            return measure_link(torch.device("cuda", index), seconds=seconds)
    return None


def _numa_node(bus: str) -> int | None:
    """NVML writes the domain with eight digits, the kernel with four; -1 is a machine with one node only."""
    path = Path("/sys/bus/pci/devices") / bus.lower()[-12:] / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
