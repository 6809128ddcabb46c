"""Size of a step and its parallelism, as the arithmetic reads them."""

from __future__ import annotations

import dataclasses

from memo.errors import UsageError
from memo.mip.inputs import Group

__all__ = ["Layout"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
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
    pp: int = 1
    """Pipeline stages."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "gpus", "tp", "cp", "pp"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.gpus % (self.tp * self.cp * self.pp):
            raise UsageError(f"{self.gpus} GPUs are not a multiple of tp {self.tp} x cp {self.cp} x pp {self.pp}")

    @property
    def rank_tokens(self) -> float:
        """Tokens of a microbatch on one rank, in tensors divided by tp and cp."""
        return self.tokens * self.batch / (self.tp * self.cp)

    @property
    def replicas(self) -> int:
        """Ranks of data parallelism: the GPUs left by tp, cp and pp."""
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def stage_gpus(self) -> int:
        """GPUs of one pipeline stage."""
        return self.gpus // self.pp

    def tensor_group(self, gpus_per_node: int) -> Group:
        """Ranks of tensor parallelism, which are neighbours."""
        return Group.of(self.tp, stride=1, gpus_per_node=gpus_per_node, gpus=self.gpus)

    def context_group(self, gpus_per_node: int) -> Group:
        """Ranks of context parallelism."""
        return Group.of(self.cp, stride=self.tp, gpus_per_node=gpus_per_node, gpus=self.gpus)

    def data_group(self, gpus_per_node: int, *, size: int | None = None) -> Group:
        """Ranks with the same weights: those of data and context parallelism, or `size` of them that are neighbours."""
        ranks = size or self.replicas * self.cp
        return Group.of(ranks, stride=self.tp, gpus_per_node=gpus_per_node, gpus=self.gpus)

    def leaves_node(self, gpus_per_node: int) -> bool:
        """Whether some stage's next one is on another node."""
        return self.pp > 1 and self.gpus > gpus_per_node
