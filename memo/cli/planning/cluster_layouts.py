"""`memo plan --search --cluster`: the space that the flags describe, and the commands that run a layout on its nodes."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING

from memo.cli.planning.on_cluster import ClusterRequest
from memo.errors import UsageError

if TYPE_CHECKING:
    from memo.search import Request

__all__ = ["cluster_of"]

_OF_EQUAL_NODES = ("nodes", "gpus_per_node")


def cluster_of(args: argparse.Namespace) -> tuple[ClusterRequest, Request, int]:
    """The cluster, and a request on equal nodes of as many GPUs as divide every node of it, with their number.

    Raises:
        UsageError: a flag does not go with a cluster.
        PlanError: the file cannot be read.
    """
    for name in _OF_EQUAL_NODES:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} does not go with --search --cluster; leave it out")
    asked = ClusterRequest.of(args)
    machines = [group.machine for group in asked.cluster.groups]
    each = math.gcd(*(machine.gpus_per_node for machine in machines))
    joined = max(machines, key=lambda machine: machine.network.nics_per_node).network
    if not joined.nics_per_node and asked.cluster.gpus > each:
        joined = dataclasses.replace(joined, nics_per_node=1)  # of the connections; placements know them
    machine = dataclasses.replace(machines[0], gpus_per_node=each, network=joined)
    return asked, dataclasses.replace(asked.request, machine=machine), asked.cluster.gpus // each
