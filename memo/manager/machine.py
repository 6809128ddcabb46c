"""The machine that a manager opens its parts on: a GPU or CPU that is here, or one that memo.rehearsal simulates.

Owns every question that `memo.offload` asks a machine: the device's budget and counters, its backend and clock, the rates of
its link, free host memory and disks. Nothing else in memo.manager, memo.autoplan or memo.swap asks the system.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from memo.allocator import memory_share
from memo.autoplan import DeviceBudget, device_budget_of
from memo.machine import LinkRates, measure_lanes, measure_link, share_of_node
from memo.swap import available_host_bytes, total_host_bytes
from memo.swap.backends import CpuBackend
from memo.swap.disk import DiskStore, in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from memo.events import Lane
    from memo.swap.backends import Backend, Disk

log = logging.getLogger("memo")

LINK_SECONDS = 0.05
"""Duration of each link measurement: long enough for a stable rate, short enough for the start of a run."""


class Machine:
    """The machine that is here, for a model on one device.

    Args:
        device: a CUDA GPU, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Words for a trace's header."""
        return f"{platform.machine()}, {os.cpu_count()} cores"

    @property
    def host_is_device(self) -> bool:
        """True on a CPU: host memory is the device's memory, and no link is between them."""
        return self.device.type == "cpu"

    @property
    def device_bytes(self) -> int | None:
        """Bytes of a GPU that this process may use; None on a CPU."""
        if self.host_is_device:
            return None
        return int(torch.cuda.get_device_properties(self.device).total_memory * memory_share(self.device))

    def device_budget(self, nbytes: int | None) -> DeviceBudget:
        """The device's budget of `nbytes`, or its usable memory for None, and its counters."""
        return device_budget_of(self.device, nbytes)

    def free_host_bytes(self) -> int:
        """Bytes of host memory that are free on this node."""
        return available_host_bytes()

    def total_host_bytes(self) -> int:
        """Bytes of host memory that this node has, or may grow to: as many as its control groups leave."""
        return max(total_host_bytes(), available_host_bytes(total_before=0))

    def share_of_node(self, nbytes: int, *, weight: int = 1) -> int:
        """This rank's share of a budget of its node, as of `memo.machine.share_of_node`. A collective call."""
        return share_of_node(nbytes, weight=weight)

    def backend(self, *, timing: bool) -> Backend:
        """Opens the device's backend; with `timing` its events measure when copies ran."""
        if self.host_is_device:
            return CpuBackend()
        from memo.swap.backends import CudaBackend

        return CudaBackend(self.device, timing=timing)

    def link(self, room_bytes: int) -> LinkRates | None:
        """Measures the link to host memory with nothing else on it; None where host memory is the device.

        Args:
            room_bytes: device memory that the measurement may take.
        """
        if self.host_is_device:
            return None
        return measure_link(self.device, seconds=LINK_SECONDS, room_bytes=room_bytes)

    def lanes(self, *, directories: Sequence[Path]) -> Mapping[Lane, float]:
        """Measures the rates of the lanes to host memory and disk, in bytes per second."""
        with torch.random.fork_rng(devices=[]):  # a step's own numbers go on as without a measurement
            return measure_lanes(self.device, directories=directories, seconds=LINK_SECONDS)

    def disk(
        self, directories: Sequence[Path], nbytes: int | None, *, verify: bool
    ) -> tuple[Disk[Any], DiskStore | None]:
        """Opens the disk for the device, and its store, if it has one.

        A CPU's tensors are written by the store directly. A GPU's go to disk by GPUDirect Storage where a trial shows that
        it works, and through pinned host blocks otherwise. Checksums need the bytes in host memory.

        Args:
            directories: of the scratch files.
            nbytes: budget; None: what the file systems have free.
            verify: stores a checksum with each block.
        """
        device = self.device
        for directory in directories:
            if (kind := in_memory(directory)) is not None:
                log.warning("disk: %s is %s, which is memory: what goes there fills the machine's own", directory, kind)
        if self.host_is_device:
            store = DiskStore(directories, nbytes, verify=verify)
            return store, store
        from memo.swap import empty_pinned
        from memo.swap.backends import copy_stream, numa_node
        from memo.swap.disk import GdsDisk, StagedDisk, obstacles, try_gds

        if not verify and not any(obstacles(directory) or try_gds(directory) for directory in directories):
            return GdsDisk(directories, nbytes, new_stream=lambda: copy_stream(device)), None
        store = DiskStore(directories, nbytes, verify=verify)
        staging = functools.partial(empty_pinned, node=numa_node(device))
        return StagedDisk(store, copy_stream(device), copy_stream(device), staging), store


_IN_USE: ContextVar[Machine | None] = ContextVar("machine", default=None)


def machine_of(device: torch.device) -> Machine:
    """The machine of a model on `device`: the one of `use_machine`, else the one that is here."""
    return _IN_USE.get() or Machine(device)


@contextlib.contextmanager
def use_machine(machine: Machine) -> Iterator[None]:
    """Managers that are opened within run on `machine`."""
    token = _IN_USE.set(machine)
    try:
        yield
    finally:
        _IN_USE.reset(token)
