"""Collectives over the weights of a model and their gradients: what sharding and data parallelism exchange, and when.

Owns the choice of collectives for each degree of sharding; their times are `memo.mip.inputs.Collectives`. Needs no torch.

    zero 3      gathers weights before each pass, reduces gradients in each backward
    zero 2      as 3, for frameworks that free the weights behind each backward
    zero 1      reduces gradients once a step to the ranks that own them, gathers updated weights behind the optimizer
    zero 0      sums gradients once a step
    whole       under zero 2 and 3, gathers once a step and reduces once a step
    hybrid      groups of ranks share one copy; what they have reduced is summed over the groups
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.mip.inputs import Collectives

if TYPE_CHECKING:
    from memo.gpt.arithmetic.layout import Layout
    from memo.gpt.arithmetic.training import Training
    from memo.mip.inputs import Group, Hardware

__all__ = ["WeightExchange"]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightExchange:
    """Times of the collectives over some of a rank's parameters."""

    machine: Hardware
    layout: Layout
    training: Training

    @property
    def shards(self) -> int:
        """Ranks that one copy of what is sharded is divided over."""
        every = self.layout.replicas * self.layout.cp
        return min(self.training.sharded_over or every, every)

    @property
    def _group(self) -> Group:
        return self.layout.data_group(self.machine.gpus_per_node, size=self.shards)

    @property
    def _copies(self) -> Group:
        """Ranks that hold the same shard."""
        return self.layout.copies_group(self.machine.gpus_per_node, shards=self.shards)

    @property
    def gathers_each_pass(self) -> bool:
        """Whether weights are gathered in each microbatch."""
        training = self.training
        return not training.whole_in_step and training.zero >= (3 if training.reduces_once else 2)

    @property
    def reduces_each_pass(self) -> bool:
        """Whether gradients are reduced in each microbatch."""
        return self.gathers_each_pass and not self.training.reduces_once

    def gather_s(self, parameters: float) -> float:
        """Seconds to gather sharded weights once; 0 where a rank has them."""
        if not self.gathers_each_pass:
            return 0.0
        return Collectives(self.machine).all_gather_s(self.training.gathered_bytes * parameters, self._group)

    def reduce_s(self, parameters: float) -> float:
        """Seconds to reduce gradients in each backward."""
        return self._reduce_s(parameters) if self.reduces_each_pass else 0.0

    def sync_s(self, parameters: float) -> float:
        """Seconds to reduce gradients once a step."""
        return 0.0 if self.reduces_each_pass else self._reduce_s(parameters)

    def update_s(self, parameters: float) -> float:
        """Seconds to gather updated weights once a step."""
        if self.training.zero == 0 or self.gathers_each_pass:
            return 0.0
        return Collectives(self.machine).all_gather_s(self.training.gathered_bytes * parameters, self._group)

    def _reduce_s(self, parameters: float) -> float:
        collectives, nbytes = Collectives(self.machine), self.training.states.reduced * parameters
        if self.training.zero == 0:
            return collectives.all_reduce_s(nbytes, self.layout.data_group(self.machine.gpus_per_node))
        summed = collectives.all_reduce_s(nbytes / self.shards, self._copies)
        return collectives.reduce_scatter_s(nbytes, self._group) + summed
