"""From the arguments of `memo.offload` to what they name: the device, its backend, the tiers behind it, the trace.

Owns how budgets and directories are read and in what order things are opened. Whoever asked closes them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memo.allocator import memory_share
from memo.errors import TraceError, UsageError
from memo.machine import measure_lanes, share_of_node
from memo.swap import available_host_bytes
from memo.swap.backends import CpuBackend
from memo.swap.disk import DiskStore
from memo.swap.tiers import DiskTier, HostTier
from memo.trace import TraceRecorder
from memo.units import parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from memo.swap.backends import Backend, Disk
    from memo.swap.tiers import Tier

__all__ = ["Room", "device_of", "link_rates", "open_backend", "open_recorder", "open_tiers"]

# Of the host memory that is free at construction, what `host="auto"` may take: the rest is the data loader's, the
# checkpoint's and the operating system's.
AUTO_HOST_SHARE = 0.7
LINK_SECONDS = 0.05
"""How long links are measured, each: long enough for a rate, short enough to begin with."""

_Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where one rank's activations may go, and how many bytes of them."""

    device: torch.device
    host_bytes: int
    """0: the tier is off."""
    disk_bytes: int | None
    """None is what the file systems have free, as it is needed."""
    directories: Sequence[Path]
    """Empty: the tier is off."""

    @classmethod
    def of(
        cls,
        device: torch.device,
        *,
        host: int | str,
        disk: _Path | Sequence[_Path] | None,
        disk_budget: int | str | None,
        weights: tuple[int, int] = (1, 1),
    ) -> Room:
        """As `memo.offload` was told. A collective call where there is a process group: a node's ranks share budgets.

        `weights` are this rank's needs of host and disk, beside those of the others.

        Raises:
            UsageError: there is no room anywhere.
        """
        disk_bytes = None
        if disk_budget is not None:
            disk_bytes = share_of_node(parse_bytes(disk_budget, what="disk_budget"), weight=weights[1])
        host_bytes = _host_bytes(host, device, weights[0])
        directories = _directories(disk, device, host_bytes)
        if host_bytes == 0 and not directories:
            raise UsageError("host=0 and no disk: there is nowhere to move activations to; give host=... or disk=...")
        return cls(device=device, host_bytes=host_bytes, disk_bytes=disk_bytes, directories=directories)


def device_of(model: nn.Module) -> torch.device:
    """The one that the model's parameters are on.

    Raises:
        UsageError: they are nowhere, or on several accelerators.
    """
    devices = {parameter.device for parameter in model.parameters()} or {torch.device("cpu")}
    kinds = {device.type for device in devices}
    if kinds == {"meta"}:
        raise UsageError("the model is on the meta device; move it to a real one before memo.offload")
    accelerators = {device for device in devices if device.type == "cuda"}
    if len(accelerators) > 1:
        names = ", ".join(sorted(map(str, accelerators)))
        raise UsageError(f"the model is spread over {names}; memo manages one GPU a process")
    return accelerators.pop() if accelerators else torch.device("cpu")


def _host_bytes(host: int | str, device: torch.device, weight: int) -> int:
    """This rank's bytes of host memory: a budget is the node's, and its ranks share it."""
    if host == "auto":
        free = int(available_host_bytes() * AUTO_HOST_SHARE)
        return 0 if device.type == "cpu" else share_of_node(free, weight=weight)
    nbytes = parse_bytes(host, what="host")
    return share_of_node(nbytes, weight=weight) if nbytes else 0


def _directories(disk: _Path | Sequence[_Path] | None, device: torch.device, host_bytes: int) -> list[Path]:
    if disk is None:
        return [Path(tempfile.gettempdir())] if device.type == "cpu" and host_bytes == 0 else []
    if isinstance(disk, (str, os.PathLike)):
        return [Path(disk)]
    return [Path(directory) for directory in disk]


def open_backend(device: torch.device, *, timing: bool) -> Backend:
    """The device's streams; with `timing` their events tell when copies ran."""
    if device.type == "cpu":
        return CpuBackend()
    from memo.swap.backends import CudaBackend

    return CudaBackend(device, timing=timing)


def link_rates(device: torch.device) -> tuple[float, float, float] | None:
    """Out, in and both ways, in bytes per second; None where host memory is the device."""
    if device.type == "cpu":
        return None
    from memo.machine import measure_link

    rates = measure_link(device, seconds=LINK_SECONDS)
    both = rates.d2h_together_bytes_per_s + rates.h2d_together_bytes_per_s
    return rates.d2h_bytes_per_s, rates.h2d_bytes_per_s, both


def open_tiers(room: Room, backend: Backend, *, verify: bool) -> tuple[list[Tier], DiskStore | None]:
    """Host first, then disk; and the store under the disk tier, whose counters the report shows."""
    tiers: list[Tier] = []
    store = None
    if room.host_bytes > 0:
        tiers.append(HostTier(backend, room.host_bytes))
    if room.directories:
        disk, store = _open_disk(room, verify=verify)
        tiers.append(DiskTier(disk, room.disk_bytes))
    return tiers, store


def _open_disk(room: Room, *, verify: bool) -> tuple[Disk, DiskStore | None]:
    """The disk as the device reaches it, and the store under it.

    The CPU's memory is the store's own. A GPU's bytes go straight to the disk where GPUDirect Storage has just been seen
    working there, and through page-locked host blocks otherwise; checksums need the host to see the bytes.
    """
    device, directories, nbytes = room.device, room.directories, room.disk_bytes
    if device.type == "cpu":
        store = DiskStore(directories, nbytes, verify=verify)
        return store, store
    from memo.swap import page_locked
    from memo.swap.backends import copy_stream, numa_node
    from memo.swap.disk import GdsDisk, StagedDisk, obstacles, try_gds

    if not verify and not any(obstacles(directory) or try_gds(directory) for directory in directories):
        return GdsDisk(directories, nbytes, new_stream=lambda: copy_stream(device)), None
    store = DiskStore(directories, nbytes, verify=verify)
    staging = functools.partial(page_locked, node=numa_node(device))
    return StagedDisk(store, copy_stream(device), copy_stream(device), staging), store


def open_recorder(trace: _Path, model: nn.Module, room: Room) -> TraceRecorder:
    """This rank's trace, with what its links gave when nothing else used them."""
    budgets = {"device": _device_bytes(room.device), "host": room.host_bytes, "disk": room.disk_bytes}
    links = measure_lanes(room.device, host=room.host_bytes > 0, directories=room.directories, seconds=LINK_SECONDS)
    meta = {
        "command": " ".join(sys.argv),
        "model": f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "plan": None,
        "budgets": budgets,
        "link_bytes_per_s": {lane.value: round(rate) for lane, rate in links.items()},
    }
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    return TraceRecorder.beside(_made(trace), rank=rank, world_size=ranks, meta=meta)


def _made(trace: _Path) -> Path:
    """The place for a trace; a name that ends in a slash is a directory, whether it is there yet or not."""
    name = os.fspath(trace)
    if name.endswith(os.sep):
        try:
            os.makedirs(name, exist_ok=True)
        except OSError as error:
            raise TraceError(f"cannot make the trace's directory {name!r}: {error.strerror}") from None
    return Path(name)


def _device_bytes(device: torch.device) -> int | None:
    """What this process may take of a GPU; the CPU's memory is not a device's."""
    if device.type == "cpu":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory * memory_share(device))
