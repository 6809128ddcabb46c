"""Size of a step and its parallelism, as the arithmetic reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memo.errors import UsageError
from memo.mip.inputs import RankGroup, Signature


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Size of a step and its parallelism.

    Raises:
        UsageError: a size is below 1, or tp x cp x pp does not divide the GPUs.
    """

    tokens: int
    """Sequence length."""
    batch: int = 1
    """Sequences in a microbatch."""
    gpus: int = 1
    """Number of GPUs in all."""
    tp: int = 1
    """Ranks of tensor parallelism."""
    cp: int = 1
    """Ranks of context parallelism."""
    ring: bool = False
    """Whether they attend in a ring even where query heads divide, and could be exchanged for tokens."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Ranks that experts are divided over: data-parallel ones that are neighbours, a divisor of the replicas."""
    tp_overlap: bool = False
    """Whether layers run in two halves, with tensor-parallel collectives of one beside the other's compute."""
    islands: tuple[int, ...] = ()
    """Replicas in each group of nodes that a stage's are divided over; without them a stage is within one such group."""
    stage_layers: int = 0
    """Layers of a stage; 0: the most that an equal division gives one."""
    group_gpus: int = 0
    """GPUs of the layout in the group of nodes that a stage is in; 0: all of them."""
    ends_apart: bool = False
    """Whether the first and the last stage are in different groups of nodes."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "gpus", "tp", "cp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.gpus % (self.tp * self.cp * self.pp):
            raise UsageError(f"{self.gpus} GPUs are not a multiple of tp {self.tp} x cp {self.cp} x pp {self.pp}")
        if self.replicas % self.ep:
            raise UsageError(f"--ep {self.ep} does not divide the {self.replicas} data-parallel ranks")
        if self.ep > 1 and self.islands:
            raise UsageError("--ep is not planned on groups of nodes that are not alike; leave it out")
        if self.ring and self.cp == 1:
            raise UsageError("--cp-attention ring has no meaning without --cp")
        if self.islands and (sum(self.islands) != self.replicas or min(self.islands) < 1):
            raise UsageError(f"replicas in groups of nodes, {self.islands}, are not the {self.replicas} of the layout")

    @property
    def halves(self) -> tuple[int, ...]:
        """Tokens of the halves in which an MLP runs, with those of other tensor-parallel ranks; one number without halves.

        Halves are of the sequences, of one sequence of each rank's tokens.
        """
        tokens = self.batch * self.tokens // self.cp
        if self.tp == 1 or not self.tp_overlap:
            return (tokens,)
        unit = self.tokens // self.cp if self.batch > 1 else self.tp
        second = tokens // unit // 2 * unit
        return (tokens - second, second)

    @property
    def attention_halves(self) -> tuple[int, ...]:
        """As `halves`, of attention: it needs all tokens of a sequence."""
        return self.halves if self.batch > 1 else (sum(self.halves),)

    @property
    def rank_tokens(self) -> float:
        """Tokens of a microbatch on one rank, in tensors divided by tp and cp."""
        return self.tokens * self.batch / (self.tp * self.cp)

    @property
    def replicas(self) -> int:
        """Ranks of data parallelism: the GPUs left by tp, cp and pp."""
        return self.gpus // (self.tp * self.cp * self.pp)

    def rings(self, heads: int) -> bool:
        """Whether ranks attend in a ring to a model of so many query heads, as memo.parallel.Layout.rings has it."""
        return self.cp > 1 and (self.ring or bool(heads % (self.tp * self.cp)))

    def layers_of_stage(self, layers: int) -> int:
        """Layers of a stage, of `layers` in all."""
        return self.stage_layers or -(-layers // self.pp)

    def signature(self, *, model: str, dtype: str, heads: int) -> Signature:
        """The step as a profile names it; a model of no heads attends in no ring."""
        sizes = {name: getattr(self, name) for name in ("batch", "tokens", "tp", "cp", "pp", "ep")}
        overlaps, ring = len(self.halves) > 1, heads > 0 and self.rings(heads)
        return Signature(model=model, dtype=dtype, ring=ring, tp_overlap=overlaps, **sizes)

    @property
    def stage_gpus(self) -> int:
        """GPUs of one pipeline stage."""
        return self.gpus // self.pp

    def tensor_group(self, gpus_per_node: int) -> RankGroup:
        """Ranks of tensor parallelism, which are neighbours."""
        return self._slowest(self.tp, stride=1, gpus_per_node=gpus_per_node)

    def context_group(self, gpus_per_node: int) -> RankGroup:
        """Ranks of context parallelism."""
        return self._slowest(self.cp, stride=self.tp, gpus_per_node=gpus_per_node)

    def expert_group(self, gpus_per_node: int) -> RankGroup:
        """Ranks that divide the experts."""
        return self._slowest(self.ep, stride=self.cp * self.tp, gpus_per_node=gpus_per_node)

    def expert_copies_group(self, gpus_per_node: int) -> RankGroup:
        """Ranks with the same experts: blocks of cp x tp neighbours, ep blocks apart."""
        block, count = self.cp * self.tp, self.replicas // self.ep
        within = max(gpus_per_node // (block * self.ep), 1) if count > 1 else 1
        return RankGroup(size=block * count, per_node=min(block * min(within, count), gpus_per_node))

    def data_group(self, gpus_per_node: int, *, size: int | None = None) -> RankGroup:
        """Ranks with the same weights: those of data and context parallelism, or `size` of them that are neighbours."""
        ranks = size or self.replicas * self.cp
        if not self.islands or all(part.replicas * part.cp % ranks == 0 for part in self._parts):
            return self._slowest(ranks, stride=self.tp, gpus_per_node=gpus_per_node)
        return self._across([part.replicas * part.cp for part in self._parts], self.tp, gpus_per_node)

    def copies_group(self, gpus_per_node: int, *, shards: int) -> RankGroup:
        """Ranks that hold the same shard, where `shards` neighbours share a copy of what is sharded."""
        count = self.replicas * self.cp // shards
        parts = self._parts
        counts = [part.replicas * part.cp // shards for part in parts]
        if len(parts) == 1 or sum(counts) != count:
            return self._slowest(count, stride=self.tp * shards, gpus_per_node=gpus_per_node)
        return self._across(counts, self.tp * shards, gpus_per_node)

    def _slowest(self, size: int, *, stride: int, gpus_per_node: int) -> RankGroup:
        """The one with the slowest links of such groups, each within one group of nodes."""
        groups = [
            RankGroup.of(size, stride=stride, gpus_per_node=gpus_per_node, gpus=part.group_gpus or part.gpus)
            for part in self._parts
        ]
        return max(groups, key=lambda group: (group.nodes > 1, -group.fewest, group.nodes, -group.per_node))

    def _across(self, counts: Sequence[int], stride: int, gpus_per_node: int) -> RankGroup:
        """Group with so many ranks in each group of nodes."""
        pairs = zip(counts, self._parts, strict=True)
        return RankGroup.across(
            [RankGroup.of(count, stride=stride, gpus_per_node=gpus_per_node, gpus=part.gpus) for count, part in pairs]
        )

    @property
    def _parts(self) -> tuple[StepLayout, ...]:
        """The layout in each group of nodes: the whole pipeline with a part of the replicas."""
        if not self.islands:
            return (self,)
        model = self.tp * self.cp * self.pp
        return tuple(dataclasses.replace(self, gpus=replicas * model, islands=()) for replicas in self.islands)

    def leaves_node(self, gpus_per_node: int) -> bool:
        """Whether some stage's next one, in the same group of nodes, is on another node."""
        return self.pp > 1 and any((part.group_gpus or part.gpus) > gpus_per_node for part in self._parts)
