"""Collectives as data: kind, ranks, bytes and count; and their time on a machine.

A step's collectives are lists of these. Predicted seconds are sums over the same lists (`exchange_s`), and a dry run
compares the lists with what a rank issues, so the two cannot differ. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memo.mip.inputs import Collectives, RankGroup

if TYPE_CHECKING:
    from memo.gpt.arithmetic.layout import StepLayout
    from memo.mip.inputs import Hardware


class CollectiveKind(enum.StrEnum):
    """Kind of a collective, or of one side of a message."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    ROTATE = "rotation"
    """Each rank sends all to the next one of its group, and receives as much from the one before."""
    SEND = "send"
    RECEIVE = "receive"


class Ranks(enum.StrEnum):
    """Ranks that a collective is over, by the mesh (pp, dp, cp, tp)."""

    TENSOR = "tp"
    CONTEXT = "cp"
    REPLICAS = "dp x cp"
    """Ranks with the same parameters, which are sharded over them or over some of them."""
    TOKENS = "dp x cp x tp"
    """Ranks with different tokens, over which a learned position table and routers are sharded."""
    EXPERTS = "ep"
    """Ranks that divide the experts."""
    EXPERT_COPIES = "dp / ep x cp x tp"
    """Ranks with the same experts, over which these are sharded."""
    STAGES = "pp"
    ENDS = "ends of pp"
    """The first and the last stage."""
    ALL = "all ranks"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Equal collectives of one rank."""

    kind: CollectiveKind
    ranks: Ranks
    nbytes: float
    """Size: of an all-gather the result on each rank, of a reduce-scatter and an all-to-all the operand, of an all-reduce
    the tensor, of a message or a rotation what is sent."""
    count: int = 1

    def times(self, count: int) -> Collective:
        """As many times as many."""
        return dataclasses.replace(self, count=self.count * count)


def group_of(ranks: Ranks, layout: StepLayout, gpus_per_node: int) -> RankGroup:
    """Places of a collective's ranks on nodes."""
    if ranks is Ranks.TENSOR:
        return layout.tensor_group(gpus_per_node)
    if ranks is Ranks.CONTEXT:
        return layout.context_group(gpus_per_node)
    if ranks is Ranks.REPLICAS:
        return layout.data_group(gpus_per_node)
    if ranks is Ranks.TOKENS:
        return RankGroup.of(layout.stage_gpus, stride=1, gpus_per_node=gpus_per_node, gpus=layout.gpus)
    if ranks is Ranks.EXPERTS:
        return layout.expert_group(gpus_per_node)
    if ranks is Ranks.EXPERT_COPIES:
        return layout.expert_copies_group(gpus_per_node)
    if ranks is Ranks.ALL:
        return RankGroup.of(layout.gpus, stride=1, gpus_per_node=gpus_per_node)
    if ranks is Ranks.ENDS and layout.ends_apart:
        return RankGroup.across([RankGroup(size=1, per_node=1)] * 2)
    return RankGroup(size=min(2, layout.pp), per_node=1 if layout.leaves_node(gpus_per_node) else min(2, layout.pp))


def exchange_s(collectives: Iterable[Collective], machine: Hardware, layout: StepLayout) -> float:
    """Seconds of collectives one after another; receives take none, since their sends do.

    Args:
        collectives: of one rank.
        machine: its links.
        layout: of the job.

    Raises:
        UsageError: a group spans nodes that no network connects.
    """
    times = Collectives(machine)
    total = 0.0
    for each in collectives:
        group = group_of(each.ranks, layout, machine.gpus_per_node)
        total += each.count * collective_s(times, each.kind, each.nbytes, group)
    return total


def collective_s(times: Collectives, kind: CollectiveKind, nbytes: float, group: RankGroup) -> float:
    """Seconds of one collective; a receive takes none, since its send does.

    Args:
        times: of the machine's links.
        kind: of the collective.
        nbytes: as of `Collective`.
        group: its ranks.

    Raises:
        UsageError: the group spans nodes that no network connects.
    """
    if kind is CollectiveKind.RECEIVE or group.size == 1:
        return 0.0
    if kind in (CollectiveKind.SEND, CollectiveKind.ROTATE):
        return times.send_s(nbytes, beyond_node=group.nodes > 1)
    timed = {
        CollectiveKind.ALL_GATHER: times.all_gather_s,
        CollectiveKind.REDUCE_SCATTER: times.reduce_scatter_s,
        CollectiveKind.ALL_REDUCE: times.all_reduce_s,
        CollectiveKind.ALL_TO_ALL: times.all_to_all_s,
    }
    return timed[kind](nbytes, group)
