"""Machine diagnosis for `memo doctor`: GPUs and links, host memory, disks and GPUDirect Storage; collectives of ranks.

Every figure is measured or read from the system, never assumed; a missing figure comes with its reason. `memo plan`
uses the rates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memo.errors import SwapError
from memo.machine.collective_rates import CollectiveRates
from memo.machine.kernel_rates import KernelRates, measure_kernels
from memo.machine.link_bandwidth import DiskRates, HostFacts, LinkRates, host_facts, measure_disk, measure_link
from memo.machine.sustained_write import SustainedWrite, measure_sustained
from memo.swap import node_of_pci_device
from memo.swap.disk import RawFile, mount_of, obstacles, try_gds


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """GPU as NVML describes it, and its measured link to host memory."""

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
    kernels: KernelRates | None = None
    """None when torch cannot use the GPU, or it has too little free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDisk:
    """Scratch directory, its file system and its rates.

    `rates` is None if and only if `problem` tells why the directory cannot be used.
    """

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
    """Result of `examine`, as `memo doctor --json` prints it."""

    gpu_driver_version: str | None
    gpus: list[Gpu]
    gpu_problem: str | None
    """Reason why there is no GPU, or why its link was not measured."""
    host: HostFacts
    disks: list[MeasuredDisk]
    striped: DiskRates | None
    """Rates of all directories striped into one store; None for fewer than two usable ones."""
    took_s: float
    sustained: SustainedWrite | None = None
    """One long write over all directories; None where none was asked for or a directory cannot be used."""
    collectives: CollectiveRates | None = None
    """Collectives among the ranks that `memo doctor` was started as; None for one process."""


def examine(directories: Sequence[Path], *, seconds: float, sustained_bytes: int = 0, nvml: Any = None) -> Diagnosis:
    """Measures the host, the GPUs and the disks.

    Args:
        directories: Scratch directories.
        seconds: Length of one measurement: one for the host, six for each disk (and the stripe), six for each GPU.
        sustained_bytes: Length of a long write over all directories, after the rest; 0: none.
        nvml: Module to use in place of pynvml.

    Raises:
        ScratchFull, StoreWriteError: In the long write. Nothing is left on the disk.
    """
    begin = time.monotonic()
    driver, gpus, problem = _gpus(nvml, seconds)
    disks = [_disk(directory, seconds) for directory in directories]
    striped, sustained, usable = None, None, not any(disk.problem for disk in disks)
    if len(disks) > 1 and usable:
        striped = measure_disk(directories, seconds=seconds)
    if sustained_bytes and usable:
        sustained = measure_sustained(directories, sustained_bytes)
    return Diagnosis(
        gpu_driver_version=driver,
        gpus=gpus,
        gpu_problem=problem,
        host=host_facts(seconds=seconds),
        disks=disks,
        striped=striped,
        sustained=sustained,
        took_s=round(time.monotonic() - begin, 3),
    )


def _disk(directory: Path, seconds: float) -> MeasuredDisk:
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
    return MeasuredDisk(
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
    """Returns the driver version, the GPUs, and the reason why there are none or they are not measured."""
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
            problem = f"torch {torch.__version__} cannot use the GPU, so links are not measured; install a CUDA build"
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return driver, [_gpu(nvml, index, handle, seconds) for index, handle in enumerate(handles)], problem
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handle: Any, seconds: float) -> Gpu:
    bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
    device = _torch_device(bus)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        # Measured first: an idle link reports a lower generation.
        link=None if device is None else measure_link(device, seconds=seconds),
        pcie_generation=int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        pcie_generation_max=int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        pcie_width=int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        pcie_width_max=int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        numa_node=_numa_node(bus),
        kernels=None if device is None else _kernels(device, seconds),
    )


def _kernels(device: torch.device, seconds: float) -> KernelRates | None:
    try:
        return measure_kernels(device, seconds=3 * seconds)
    except torch.cuda.OutOfMemoryError:
        return None


def _torch_device(bus: str) -> torch.device | None:
    """Torch's device with this PCI address: CUDA_VISIBLE_DEVICES renumbers torch's devices, not NVML's."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties: Any = torch.cuda.get_device_properties(index)
        address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
        if bus.lower().startswith(address):
            return torch.device("cuda", index)
    return None


def _numa_node(bus: str) -> int | None:
    """NUMA node of a PCI address as NVML writes it: `00000000:65:00.0`; None for any other text."""
    try:
        domain, number, device = (int(part, 16) for part in bus.partition(".")[0].split(":"))
    except ValueError:
        return None
    return node_of_pci_device(domain, number, device)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
