"""Simulated machine: a GPU by its data sheet, its host, its disks and its peers, as memo.manager.machine asks for them.

One of several GPUs is rehearsed, the others are taken to do the same: each has an equal share of its node's host memory,
disk space and disk rates, and collectives begin when this one is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.autoplan import DeviceBudget
from memo.errors import UsageError
from memo.events import Lane
from memo.machine import LinkRates
from memo.manager import Machine
from memo.mip.inputs import Hardware, hardware_preset
from memo.rehearsal.backend import SimulatedBackend, SimulatedDisk
from memo.rehearsal.clock import Clock
from memo.rehearsal.kernels import SimulatedKernels
from memo.rehearsal.memory import SimulatedDeviceMemory
from memo.rehearsal.network import SimulatedNetwork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from memo.swap.disk import DiskStore

USABLE = 0.94
"""As memo.autoplan.device_budget has it: the share of a GPU's memory that is the default budget."""
FIRMWARE_BYTES = 841 << 20
"""Bytes of a GPU's nominal memory that torch does not count as its total: H100 of 80 GiB, CUDA 13."""
OUTSIDE_BYTES = 700 << 20
"""Bytes of a GPU that its context and torch's kernels take before the first tensor: H100, CUDA 13."""
LOCK_S_PER_GIB = 0.1
"""Pinning as memo does it: 0.075 to 0.12 s a GiB (benchmarks/results, H100 and H200)."""
GIB = 1 << 30


class SimulatedMachine(Machine):
    """A machine with GPUs that are not here.

    Args:
        hardware: rates and memories, or a preset's name, such as "h100".
        ranks: GPUs of the training, which fill one node after the other.
        rank: number of the GPU that is rehearsed.
        weights: need of host memory and disk by pipeline stage, whose ranks follow one another.
        host_bytes: host memory of a node that is free; None: as much as the hardware has for each of its GPUs in use.
        disk_bytes: disk space of a node; 0: there is no disk.
        disk_write_bytes_per_s: rate of a node's writes; None: the hardware's for each of its GPUs in use.
        disk_read_bytes_per_s: rate of a node's reads; None: the hardware's for each of its GPUs in use.
        assume: number that each element has where the program reads a tensor without contents; None: that is an error.

    Raises:
        UsageError: no preset has this name, there is a disk without a rate, or nodes that no network connects.
    """

    def __init__(
        self,
        hardware: Hardware | str,
        *,
        ranks: int = 1,
        rank: int = 0,
        weights: Sequence[int] = (1,),
        host_bytes: int | None = None,
        disk_bytes: int = 0,
        disk_write_bytes_per_s: float | None = None,
        disk_read_bytes_per_s: float | None = None,
        assume: float | None = None,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.hardware = hardware = hardware_preset(hardware) if isinstance(hardware, str) else hardware
        self.ranks, self.rank = ranks, rank

        def weight(of_rank: int) -> int:
            return weights[of_rank * len(weights) // ranks]

        first = rank - rank % hardware.gpus_per_node
        on_its_node = range(first, min(ranks, first + hardware.gpus_per_node))
        self._weight, self._weight_of_node = weight(rank), sum(map(weight, on_its_node))
        self._on_node = on_node = min(ranks, hardware.gpus_per_node)
        in_use = on_node / hardware.gpus_per_node

        def own(given: float | None, of_node: float) -> float:
            return (of_node * in_use if given is None else given) / on_node

        self._disk_write = own(disk_write_bytes_per_s, hardware.disk_write_bytes_per_s)
        self._disk_read = own(disk_read_bytes_per_s, hardware.disk_read_bytes_per_s)
        if disk_bytes and not (self._disk_write > 0 and self._disk_read > 0):
            raise UsageError(f"{hardware.name}: a disk needs rates of writes and reads, in bytes per second")
        self.disk_bytes = disk_bytes
        self._host_bytes = int(hardware.host_bytes * in_use) if host_bytes is None else host_bytes
        self.clock = Clock(round(1e9 * hardware.launch_s))
        self.memory = SimulatedDeviceMemory(self.device_bytes - OUTSIDE_BYTES)
        self.network = SimulatedNetwork(hardware, ranks)
        self.kernels = SimulatedKernels(
            hardware,
            self.clock,
            self.memory,
            self.network,
            assume=assume,
            host_bytes_per_s=hardware.node_d2h_bytes_per_s / on_node,
        )
        # One for all that open one: they share the link.
        self._backend = SimulatedBackend(self.clock, self.link(), lock_s_per_byte=LOCK_S_PER_GIB / GIB)

    @property
    def name(self) -> str:
        """Words for a trace's header."""
        return f"{self.hardware.name}, simulated"

    @property
    def host_is_device(self) -> bool:
        """Returns False: the GPU has memory of its own."""
        return False

    @property
    def device_bytes(self) -> int:
        """Bytes of the GPU, as torch has them."""
        return self.hardware.device_bytes - FIRMWARE_BYTES

    def device_budget(self, nbytes: int | None) -> DeviceBudget:
        """The budget, with the counters of the simulated memory."""
        total, memory = int(self.device_bytes * USABLE), self.memory
        return DeviceBudget(
            total_bytes=total if nbytes is None else min(total, nbytes),
            peak_bytes=lambda: memory.peak,
            restart=memory.restart,
            used_bytes=lambda: memory.used,
        )

    def free_host_bytes(self) -> int:
        """The host memory that is free."""
        return self._host_bytes

    def take_host_bytes(self, nbytes: int) -> None:
        """Counts host memory as taken, for good."""
        self._host_bytes -= nbytes

    def total_host_bytes(self) -> int:
        """The host memory that is free: there is no more."""
        return self._host_bytes

    def share_of_node(self, nbytes: int, *, weight: int = 1) -> int:
        """A share by the weight of the rank's stage: ranks of one stage need the same."""
        return nbytes * self._weight // self._weight_of_node

    def backend(self, *, timing: bool) -> SimulatedBackend:
        """A backend on this machine's clocks; times are always measured."""
        return self._backend

    def link(self, room_bytes: int = 0) -> LinkRates:
        """Rates of the GPU's link by the hardware's description, which takes no room."""
        hardware = self.hardware
        return LinkRates(
            d2h_bytes_per_s=hardware.d2h_bytes_per_s,
            h2d_bytes_per_s=hardware.h2d_bytes_per_s,
            d2h_together_bytes_per_s=hardware.duplex_bytes_per_s / 2,
            h2d_together_bytes_per_s=hardware.duplex_bytes_per_s / 2,
        )

    def lanes(self, *, directories: Sequence[Path]) -> Mapping[Lane, float]:
        """Rates by lane."""
        found = {Lane.D2H: self.hardware.d2h_bytes_per_s, Lane.H2D: self.hardware.h2d_bytes_per_s}
        if directories:
            found |= {Lane.DISK_WRITE: self._disk_write, Lane.DISK_READ: self._disk_read}
        return found

    def disk(
        self, directories: Sequence[Path], nbytes: int | None, *, verify: bool
    ) -> tuple[SimulatedDisk, DiskStore | None]:
        """A simulated disk; nothing is written."""
        rates = {"write_bytes_per_s": self._disk_write, "read_bytes_per_s": self._disk_read}
        return SimulatedDisk(self.clock, nbytes, **rates), None
