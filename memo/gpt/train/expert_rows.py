"""Largest number of rows that one rank's experts get in a step, as a multiple of the mean of the ranks, and which rank's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from memo.gpt.arithmetic.mixture_bytes import SKEW
from memo.gpt.model.experts import MoeMlp
from memo.gpt.model.pipeline_stage import PipelineStage
from memo.parallel import Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """The layer and rank whose experts got most rows in a step."""

    times: float
    """Rows of one microbatch, as a multiple of the mean over the ranks that divide the experts."""
    rank: int
    layer: int

    @property
    def is_planned(self) -> bool:
        """True where a plan's memory has room for this many rows."""
        return self.times <= SKEW

    def __str__(self) -> str:
        return (
            f"the experts of rank {self.rank} in layer {self.layer} got {self.times:.2f} times the mean of rows; plans have "
            f"room for {SKEW} times, and what a step saves beyond it goes to the next tier"
        )


class ExpertRowsMeter:
    """Compares the rows of all ranks, once a step.

    Args:
        stages: of this rank; those of some ranks of a pipeline may have no experts.
        device: of its tensors.
        layout: of the run.
    """

    def __init__(self, stages: Sequence[PipelineStage], device: torch.device, layout: Layout) -> None:
        self._experts = {
            int(number): layer.mlp.experts
            for stage in stages
            for number, layer in stage.layers.items()
            if isinstance(layer.mlp, MoeMlp) and layer.mlp.experts.group is not None
        }
        self._device = device
        self._ranks = layout.ranks
        self._parted = layout.ep > 1

    def restart(self) -> None:
        """Forgets the rows so far."""
        for experts in self._experts.values():
            experts.most_rows = 0.0

    def take(self) -> ExpertRows | None:
        """Rows since `restart`; None without expert parallelism. A collective call of all ranks."""
        if not self._parted:
            return None
        own = max(
            ((experts.most_rows, layer) for layer, experts in self._experts.items()),
            key=lambda each: each[0],
            default=(0.0, 0),
        )
        told = torch.zeros(2, self._ranks, dtype=torch.float64, device=self._device)
        told[:, dist.get_rank()] = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(told)
        times, layers = told.tolist()
        rank = max(range(self._ranks), key=times.__getitem__)
        return ExpertRows(times=times[rank], rank=rank, layer=int(layers[rank]))
