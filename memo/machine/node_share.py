"""Host memory and disk budgets of a node: what it has, and their division among its ranks."""

from __future__ import annotations

import socket

import torch.distributed as dist

from memo.errors import UsageError
from memo.units import format_bytes

AUTO_HOST_SHARE = 0.7
"""Share of the free host memory that `host="auto"` takes; the rest is for data loader, checkpoints and system."""


def require_host_memory(nbytes: int, machine_bytes: int, *, argument: str = "host='{}'") -> None:
    """Refuses a host budget above the machine's memory.

    Args:
        nbytes: Budget of the node.
        machine_bytes: Memory of the node.
        argument: How the budget is given, with braces for its size, such as `--host {}`.

    Raises:
        UsageError: it is above.
    """
    if nbytes <= machine_bytes:
        return
    most = int(machine_bytes * AUTO_HOST_SHARE)
    size = f"{most >> 30}GiB" if most >> 30 else f"{most >> 20}MiB"
    given, there = format_bytes(nbytes), format_bytes(machine_bytes, down=True)
    name = argument.replace("=", " ").split()[0]
    raise UsageError(
        f"{name}: {given} is more than the machine's {there} of memory; give {argument.format(size)} or less"
    )


def share_of_node(nbytes: int, *, weight: int = 1) -> int:
    """Returns this rank's share of a budget for the whole node; all of it without a process group.

    A collective call where a process group exists: every rank must make it.

    Args:
        nbytes: Budget of the node; where ranks of a node differ, the smallest counts.
        weight: Need of this rank; shares are proportional to it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return nbytes
    offers: list[tuple[str, int, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, (host_name(), nbytes, weight))
    here = [offer for offer in offers if offer is not None and offer[0] == host_name()]
    return min(offer[1] for offer in here) * weight // sum(offer[2] for offer in here)


def host_name() -> str:
    """Returns a name that processes share if and only if they are on one host."""
    # The boot id distinguishes machines, the host name containers of one machine.
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{socket.gethostname()} {boot.read().strip()}"
    except OSError:
        return socket.gethostname()
