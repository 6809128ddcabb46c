"""Vocabulary parallelism: the rows of an embedding or an output projection are divided over a tensor-parallel group.

Owns the division (equal shards, fewer rows on the last ranks), the lookup of tokens, and the gathered logits. Does not
own the loss, which reduces over shards without gathering logits (memo.loss.output_rows). Parameters become DTensors;
activations stay ordinary tensors.

    tokens (b, s/tp) -> gathered (b, s), 8 bytes each -> local rows, else zero (b, s, h) -> reduce-scatter (b, s/tp, h)
    hidden (b, s, h) -> logits of local rows (b, s, v/tp) -> all-gather (b, s, v)
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from memo.errors import UsageError
from memo.parallel.collectives import all_gathered, copy_in, gather, join, scatter_sum, sum_out


class VocabularyParallel(ParallelStyle):
    """Parallel style that divides the rows of an nn.Embedding, or of an nn.Linear and its bias.

    Forward results are unchanged: hidden states of the embedding, all logits of the projection.

    Args:
        sequence: sequence parallelism: tokens and hidden states are this rank's, not those of the whole sequence.

    Raises:
        UsageError: on use, where a rank would have no row; the module is unchanged.
    """

    def __init__(self, *, sequence: bool) -> None:
        self.sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divide(module, device_mesh)
        module.__class__ = _DividedEmbedding if isinstance(module, nn.Embedding) else _DividedProjection
        divided = cast("DividedRows", module)
        divided._tp_group, divided._tp_sequence = device_mesh.get_group(), self.sequence
        return module


def check_rows(rows: int, ranks: int) -> None:
    """Raises UsageError where a rank would have no row."""
    if _most_rows(rows, ranks) * (ranks - 1) >= rows:
        raise UsageError(f"{ranks} ranks leave one without any of the vocabulary's {rows} tokens; use fewer")


def own_rows(weight: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a weight: the local part of a DTensor, else all.

    Raises:
        UsageError: the rows are also sharded over replicas, and not gathered.
    """
    if not isinstance(weight, DTensor):
        return weight
    if weight.device_mesh.ndim > 1:
        raise UsageError(
            "the vocabulary's rows are sharded over replicas and not gathered: do all of this, the loss too, in the forward "
            "of the module that was given to fully_shard"
        )
    return weight.to_local()


class DividedRows(nn.Module):
    """Mixin of modules that VocabularyParallel divided."""

    weight: torch.Tensor
    _tp_group: torch.distributed.ProcessGroup
    _tp_sequence: bool

    @property
    def ranks(self) -> tuple[torch.distributed.ProcessGroup, bool]:
        """(group of the shards, True where each rank has hidden states of its own tokens only)."""
        return self._tp_group, self._tp_sequence

    def _most(self) -> int:
        return _most_rows(self.weight.shape[0], self._tp_group.size())


class _DividedEmbedding(DividedRows, nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._tp_sequence:
            tokens = all_gathered(tokens, self._tp_group, 1)
        rows = own_rows(self.weight)
        first = self._tp_group.rank() * self._most()
        row = tokens - first
        here = (row >= 0) & (row < rows.shape[0])
        elsewhere = ~here & (tokens >= 0) & (tokens < self.weight.shape[0])  # others are an error, as in one process
        found = F.embedding(row.masked_fill(elsewhere, 0), rows, self._padding_row(first, rows.shape[0]))
        found = found.masked_fill_(~here[..., None], 0)
        return scatter_sum(found, self._tp_group, 1) if self._tp_sequence else sum_out(found, self._tp_group)

    def _padding_row(self, first: int, rows: int) -> int | None:
        """Local index of the padding row, which gets no gradient; None where it is on another rank."""
        if self.padding_idx is None or not first <= self.padding_idx < first + rows:
            return None
        return self.padding_idx - first


class _DividedProjection(DividedRows, nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        group = self._tp_group
        hidden = gather(hidden, group, hidden.ndim - 2) if self._tp_sequence else copy_in(hidden, group)
        bias = None if self.bias is None else own_rows(self.bias)
        logits = F.linear(hidden, own_rows(self.weight), bias)
        padded = F.pad(logits, (0, self._most() - logits.shape[-1]))
        return join(padded, group, padded.ndim - 1)[..., : self.weight.shape[0]].contiguous()


def _most_rows(vocabulary: int, ranks: int) -> int:
    """Rows of every rank but the last ones, as DTensor's Shard(0) divides them."""
    return -(-vocabulary // ranks)


def _divide(module: nn.Module, mesh: DeviceMesh) -> None:
    check_rows(cast("torch.Tensor", module.weight).shape[0], mesh.size())
    for name, whole in list(module.named_parameters(recurse=False)):
        rows = _most_rows(whole.shape[0], mesh.size())
        local = whole.detach()[mesh.get_local_rank() * rows :][:rows].clone()  # a view would hold the whole
        divided = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        setattr(module, name, nn.Parameter(divided, requires_grad=whole.requires_grad))
