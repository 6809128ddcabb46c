"""Launch lines of a layout on groups of nodes that are not alike: a torchrun command for each run of nodes, in rank order.

Owns the order of nodes. Ranks are numbered by stage, then replica, so nodes follow the places of the placement; torchrun
numbers ranks by `--node-rank`, whatever each node's number of processes is.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING

from memo.search import PORT, Launch, train_arguments

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan
    from memo.mip.cluster import Placement

__all__ = ["cluster_launch"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes of one group whose ranks follow one another."""

    group: int
    count: int
    ranks: int
    """On each of them."""


def cluster_launch(plan: ActivationPlan, placement: Placement, *, plan_file: str) -> Launch | None:
    """A line for each run of nodes: which they are, and the command to start on each; None where ranks would be split.

    Args:
        plan: what is run.
        placement: its placement.
        plan_file: where the plan is.
    """
    order = _in_order(placement)
    if not order:
        return None
    every = sum(nodes.count for nodes in order)
    lines, first, train = [], 0, train_arguments(plan, plan_file)
    for nodes in order:
        name, last = placement.cluster.groups[nodes.group].name, first + nodes.count - 1
        which = f"node {first}" if first == last else f"nodes {first} to {last}"
        number = str(first) if first == last else "RANK"
        command = f"torchrun --nnodes {every} --node-rank {number} --nproc-per-node {nodes.ranks}"
        command += f" --master-addr HOST --master-port {PORT} -m memo.cli.main train {shlex.join(train)}"
        lines.append(f"{which}, of {name}: {command}")
        first = last + 1
    return Launch(torchrun="\n".join(lines), slurm=None, train=train)


def _in_order(placement: Placement) -> list[_Nodes]:
    """The nodes by their ranks; none where a node would hold ranks that do not follow one another."""
    runs: list[list[int]] = []  # group, ranks
    for place in placement.places:
        for group, replicas in zip(place.groups, place.replicas, strict=True):
            ranks = replicas * placement.tp * placement.cp
            if runs and runs[-1][0] == group:
                runs[-1][1] += ranks
            else:
                runs.append([group, ranks])
    found = []
    for group, ranks in runs:
        per_node = placement.cluster.groups[group].machine.gpus_per_node
        alone = sum(one[0] == group for one in runs) == 1
        if ranks % per_node and not (alone and ranks < per_node):
            return []
        found.append(_Nodes(group, max(ranks // per_node, 1), min(ranks, per_node)))
    return found
