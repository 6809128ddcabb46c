"""Exchange of the embedding's gradient as rows: each data-parallel rank sends the rows of the tokens that it has seen.

Owns the exchange once a step, after the last backward. The table is whole on every rank (of tensor parallelism
its part), and no part of FSDP.

    rank 0   rows 3 7 9   ──┐                     ┌── every rank:  0 + rows of rank 0 + rows of rank 1 + ..., divided
    rank 1   rows 2 7     ──┴── all-gathers ──────┘                by the number of ranks

Rows are summed over a rank's tokens before they are sent, and added in the order of the ranks, so the result is the same
on every rank and in every run. Two ranks have the dense exchange's bits, since a sum of two does not depend on their
order, and so has every row that at most two ranks have seen. The dense exchange of N ranks adds others in an order of
its own: the two differ by at most 2 N 2^-24 of the mean of the summands' magnitudes in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from memo.parallel import all_gathered

if TYPE_CHECKING:
    from memo.gpt.model.pipeline_stage import PipelineStage
    from memo.parallel import World


class SparseEmbeddingGradient:
    """Exchange of the gradient of the embedding on this rank's first stage, where that is not FSDP's.

    Args:
        stages: this rank's stages.
        world: the ranks.
    """

    def __init__(self, stages: Sequence[PipelineStage], world: World) -> None:
        tables = [stage.tokens.weight for stage in stages if stage.sparse_embedding and stage.tokens is not None]
        self._table = tables[0] if tables else None
        self._group: dist.ProcessGroup = world.replicas.get_group()
        self.rows_seen: Callable[[torch.Tensor], torch.Tensor] = rows_seen
        """Numbers of a gradient's rows that a rank sends, by the gradient; a dry run, without contents, has its own."""

    def exchange(self) -> None:
        """Replaces the gradient by its mean over the ranks. A collective call of the table's ranks."""
        if self._table is None:
            return
        grad = self._table.grad
        assert grad is not None
        mean_of_rows(getattr(grad, "_local_tensor", grad), self._group, rows_seen=self.rows_seen)


def rows_seen(grad: torch.Tensor) -> torch.Tensor:
    """Numbers of the rows of (rows, columns) that are not zero, ascending, int64."""
    return (grad != 0).any(dim=1).nonzero().squeeze(1)


def mean_of_rows(
    grad: torch.Tensor, group: dist.ProcessGroup, *, rows_seen: Callable[[torch.Tensor], torch.Tensor] = rows_seen
) -> None:
    """Replaces a gradient of few rows that are not zero by its mean over the group, row by row. A collective call.

    Args:
        grad: (rows, columns), of the same shape on all ranks.
        group: the ranks.
        rows_seen: numbers of this rank's rows that are not zero.
    """
    own = rows_seen(grad)
    counts = all_gathered(torch.tensor([len(own)], device=grad.device), group, 0).tolist()
    most = max(counts)
    if not most:
        return  # a tensor-parallel rank whose part of the vocabulary nobody has seen
    numbers = own.new_zeros(most, dtype=torch.int32)
    numbers[: len(own)] = own
    rows = grad.new_zeros(most, grad.shape[1])
    rows[: len(own)] = grad[own]
    every_number = all_gathered(numbers, group, 0).split(most)
    every_row = all_gathered(rows, group, 0).split(most)
    grad[own] = 0
    for count, theirs, values in zip(counts, every_number, every_row, strict=True):
        # No row is there twice, so each element is added to once, in this order on every device.
        grad.index_add_(0, theirs[:count].long(), values[:count])
    touched = torch.cat([theirs[:count] for count, theirs in zip(counts, every_number, strict=True)]).long().unique()
    grad[touched] /= group.size()
