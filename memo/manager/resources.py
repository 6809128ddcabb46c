"""Resources of one Manager: device, backend, tiers and trace, opened from the arguments of `memo.offload`.

Owns the meaning of budgets and directories, and the order in which resources are opened. The caller closes them.
"""

from __future__ import annotations

import contextlib
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

from memo.errors import TraceError, UsageError
from memo.machine import AUTO_HOST_SHARE, require_host_memory
from memo.swap import HostPool, local_part
from memo.swap.tiers import DiskTier, HostTier
from memo.trace import TraceRecorder
from memo.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from memo.manager.machine import Machine
    from memo.swap.backends import Backend
    from memo.swap.disk import DiskStore
    from memo.swap.tiers import Tier

_Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierBudgets:
    """Budgets of one rank's host and disk tiers."""

    machine: Machine
    host_bytes: int
    """0: the tier is off."""
    disk_bytes: int | None
    """None: what the file systems have free, reserved as needed."""
    directories: Sequence[Path]
    """Empty: the disk tier is off."""
    pool: tuple[str, int] | None = None
    """File of the host budget that all jobs of the node share, and that budget; None: it is this job's alone."""

    @classmethod
    def of(
        cls,
        machine: Machine,
        *,
        host: int | str,
        host_pool: _Path | None,
        disk: _Path | Sequence[_Path] | None,
        disk_budget: int | str | None,
        weights: tuple[int, int] = (1, 1),
        share: Callable[..., int] | None = None,
        reserved_bytes: int = 0,
    ) -> TierBudgets:
        """Reads the budgets given to `memo.offload`. With a process group a collective call: a node's ranks share them.

        Args:
            machine: the machine of the model's device.
            host: as of `memo.offload`.
            host_pool: as of `memo.offload`.
            disk: as of `memo.offload`.
            disk_budget: as of `memo.offload`.
            weights: this rank's weight, relative to the node's other ranks, in sharing host and disk.
            share: gives this rank's share of bytes of the node; None: the machine's, which asks all ranks.
            reserved_bytes: host memory that "auto" leaves to what this rank has still to allocate there.

        Raises:
            UsageError: both tiers are off, a budget cannot be parsed, a shared one has no size, or the host's is above the
                machine's memory.
        """
        share = share or machine.share_of_node
        disk_bytes = None
        if disk_budget is not None:
            disk_bytes = share(parse_bytes(disk_budget, what="disk_budget"), weight=weights[1])
        host_bytes = _host_bytes(host, machine, functools.partial(share, weight=weights[0]), reserved_bytes)
        directories = _directories(disk, machine, host_bytes)
        if disk_budget is not None and not directories:
            raise UsageError("disk_budget: there is no disk; give disk='/scratch', too, or leave disk_budget out")
        if host_bytes == 0 and not directories:
            raise UsageError("host=0 and no disk: there is nowhere to move activations to; give host=... or disk=...")
        return cls(
            machine=machine,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            directories=directories,
            pool=_pool(host_pool, host),
        )


def device_of(model: nn.Module) -> torch.device | None:
    """Returns the device that the model computes on; None if all parameters are on the meta device.

    That of its parameters, a GPU if some are on the CPU; under FSDP with CPU offload the GPU that they are copied to.

    Raises:
        UsageError: the parameters are on several GPUs, or on a device that is neither a CPU nor a CUDA GPU.
    """
    devices = {_computed_on(parameter) for parameter in model.parameters()} or {torch.device("cpu")}
    devices |= {
        place for one in model.modules() if isinstance(place := getattr(one, "compute_device", None), torch.device)
    }
    if {device.type for device in devices} == {"meta"}:
        return None
    unknown = sorted({device.type for device in devices} - {"cpu", "cuda", "meta"})
    if unknown:
        raise UsageError(f"the model is on {unknown[0]}; memo manages models on a CPU or on a CUDA GPU")
    accelerators = {device for device in devices if device.type == "cuda"}
    if len(accelerators) > 1:
        names = ", ".join(sorted(map(str, accelerators)))
        raise UsageError(f"the model is spread over {names}; memo manages one GPU a process")
    return accelerators.pop() if accelerators else torch.device("cpu")


def _computed_on(parameter: nn.Parameter) -> torch.device:
    mesh = getattr(parameter, "device_mesh", None)
    if parameter.device.type == "cpu" and mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def offloaded_training_bytes(model: nn.Module, device: torch.device) -> int:
    """Host bytes that training has still to allocate for parameters on the host of a model that computes on a GPU.

    Their gradients, and AdamW's two moments of the parameters' format, which the first step of an optimizer makes.
    """
    if device.type == "cpu":
        return 0
    parts = ((one, local_part(one)) for one in model.parameters() if one.requires_grad)
    return sum((2 + (one.grad is None)) * part.nbytes for one, part in parts if part.device.type == "cpu")


def _host_bytes(host: int | str, machine: Machine, share: Callable[[int], int], reserved_bytes: int) -> int:
    """This rank's share of the node's host budget."""
    if host == "auto":
        free = int(machine.free_host_bytes() * AUTO_HOST_SHARE)
        return 0 if machine.host_is_device else max(share(free) - reserved_bytes, 0)
    nbytes = parse_bytes(host, what="host")
    require_host_memory(nbytes, machine.total_host_bytes())
    return share(nbytes) if nbytes else 0


def _pool(path: _Path | None, host: int | str) -> tuple[str, int] | None:
    """The shared budget; the node's, of which this rank has its share in any case."""
    if path is None:
        return None
    if host == "auto":
        raise UsageError("host_pool needs host=SIZE, such as host='64GiB': the budget of all jobs that share the file")
    return os.fspath(path), parse_bytes(host, what="host")


def _directories(disk: _Path | Sequence[_Path] | None, machine: Machine, host_bytes: int) -> list[Path]:
    if disk is None:
        return [Path(tempfile.gettempdir())] if machine.host_is_device and host_bytes == 0 else []
    if isinstance(disk, (str, os.PathLike)):
        return [Path(disk)]
    return [Path(directory) for directory in disk]


def open_tiers(room: TierBudgets, backend: Backend, *, verify: bool) -> tuple[list[Tier], DiskStore | None]:
    """Opens the host tier, then the disk tier; also returns the disk tier's store, whose counters the report shows."""
    tiers: list[Tier] = []
    store = None
    with contextlib.ExitStack() as undo:
        if room.host_bytes > 0:
            pool = None if room.pool is None else HostPool(*room.pool)
            tiers.append(HostTier(backend, room.host_bytes, pool=pool))
            undo.callback(tiers[0].close)
        if room.directories:
            disk, store = room.machine.disk(room.directories, room.disk_bytes, verify=verify)
            tiers.append(DiskTier(disk, room.disk_bytes))
        undo.pop_all()
    return tiers, store


def open_recorder(
    trace: _Path,
    model: nn.Module,
    room: TierBudgets,
    *,
    device_bytes: int | None,
    stacks: bool = False,
    now_ns: Callable[[], int],
) -> TraceRecorder:
    """Opens this rank's trace; its header has the budgets and the rates of the links, measured alone."""
    machine = room.machine
    budgets = {"device": device_bytes, "host": room.host_bytes, "disk": room.disk_bytes}
    links = machine.lanes(directories=room.directories)
    meta = {
        "command": " ".join(sys.argv),
        "model": f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        "hardware": machine.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "plan": None,
        "budgets": budgets,
        "link_bytes_per_s": {lane.value: round(rate) for lane, rate in links.items()},
    }
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    return TraceRecorder.beside(
        _trace_path(trace), rank=rank, world_size=ranks, meta=meta, stacks=stacks, now_ns=now_ns
    )


def _trace_path(trace: _Path) -> Path:
    """The path for a trace; a name that ends in a slash is a directory, which is made if missing."""
    name = os.fspath(trace)
    if name.endswith(os.sep):
        try:
            os.makedirs(name, exist_ok=True)
        except OSError as error:
            raise TraceError(f"cannot make the directory {name!r} for the trace: {error.strerror}") from None
    return Path(name)
