"""An embedding, or an output projection, whose rows are divided over a tensor-parallel group: a rank holds a part of the
vocabulary.

Owns how the rows are divided (equally, fewer on the last rank where they do not divide) and how tokens are looked up in
them. Does not own the loss, which needs statements about all rows (memo.gpt.vocabulary). As everywhere in parallel layers,
a parameter becomes a DTensor and activations stay ordinary tensors.

    tokens (b, s/tp) -> gathered (b, s), 8 bytes each -> own rows, else zero (b, s, h) -> summed, a shard each (b, s/tp, h)
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
from memo.parallel.collectives import all_gathered, scatter_sum, sum_out

__all__ = ["RowsOfVocabulary", "own_rows"]


class RowsOfVocabulary(ParallelStyle):
    """Divides the rows of an nn.Embedding, whose forward still gives hidden states, or of an nn.Linear, used for its weight.

    Raises:
        UsageError: a rank would have no row.
    """

    def __init__(self, *, sequence: bool) -> None:
        self.sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divide(module, device_mesh)
        if isinstance(module, nn.Embedding):
            divided = cast("_DividedEmbedding", module)
            divided.__class__ = _DividedEmbedding
            divided._tp_group, divided._tp_sequence = device_mesh.get_group(), self.sequence
        return module


def own_rows(weight: torch.Tensor) -> torch.Tensor:
    """The rows that are here: all of an ordinary matrix."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class _DividedEmbedding(nn.Embedding):
    _tp_group: torch.distributed.ProcessGroup
    _tp_sequence: bool

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._tp_sequence:
            tokens = all_gathered(tokens, self._tp_group, 1)
        rows = own_rows(self.weight)
        place = tokens - self._tp_group.rank() * _most_rows(self.num_embeddings, self._tp_group.size())
        here = (place >= 0) & (place < rows.shape[0])
        found = F.embedding(place.where(here, 0), rows).masked_fill_(~here[..., None], 0)
        return scatter_sum(found, self._tp_group, 1) if self._tp_sequence else sum_out(found, self._tp_group)


def _most_rows(vocabulary: int, ranks: int) -> int:
    """Rows of every rank but the last ones, as DTensor divides them."""
    return -(-vocabulary // ranks)


def _divide(module: nn.Module, mesh: DeviceMesh) -> None:
    whole = cast("nn.Parameter", module.weight)
    rows, ranks = whole.shape[0], mesh.size()
    most = _most_rows(rows, ranks)
    if most * (ranks - 1) >= rows:
        raise UsageError(f"--tp {ranks} leaves a rank without any of the vocabulary's {rows} tokens; use fewer")
    local = whole.detach()[mesh.get_local_rank() * most :][:most].clone()  # a view would hold the whole
    divided = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    module.weight = nn.Parameter(divided, requires_grad=whole.requires_grad)
