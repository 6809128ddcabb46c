"""Shares of a node's host memory, link and disks: its ranks agree on them instead of each taking all."""

from __future__ import annotations

import socket

import torch.distributed as dist

__all__ = ["share_of_node"]


def share_of_node(nbytes: int, *, weight: int = 1) -> int:
    """This rank's part of a budget that is meant for the whole node, in bytes; all of it without a process group.

    Parts are in proportion to `weight`, each rank's need. A collective call where a group exists: every rank must make it.
    Ranks that were given different budgets agree on the smallest: the node has what the most careful of them said.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return nbytes
    offers: list[tuple[str, int, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, (_host_name(), nbytes, weight))
    here = [offer for offer in offers if offer is not None and offer[0] == _host_name()]
    return min(offer[1] for offer in here) * weight // sum(offer[2] for offer in here)


def _host_name() -> str:
    # Containers of one machine may share a name and not memory; the boot id tells machines apart, the name containers.
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{socket.gethostname()} {boot.read().strip()}"
    except OSError:
        return socket.gethostname()
