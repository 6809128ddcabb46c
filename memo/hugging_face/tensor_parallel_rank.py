"""One tensor-parallel rank of a short model, as `memo.parallelize` divides it, without the other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memo.hugging_face.layer_kinds import ShortModel
from memo.parallel import fake_group
from memo.parallel.decoders import parallelize
from memo.swap import local_part


@contextlib.contextmanager
def tensor_parallel_rank(short: ShortModel, ranks: int) -> Iterator[ShortModel]:
    """Divides the model in place and gives this rank's numbers of parameters; its collectives run within the block.

    Raises:
        UsageError: `memo.parallelize` does not divide it over so many ranks.
    """
    if ranks == 1:
        yield short
        return
    with fake_group(ranks):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            parallelize(short.model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
        model: Any = short.model
        table, projection = model.get_input_embeddings(), model.get_output_embeddings()
        inside = {parameter for stack in short.stacks for layer in stack for parameter in layer.parameters()}
        embedding = set() if table is None else set(table.parameters())
        kinds = tuple(
            dataclasses.replace(
                kind,
                parameters=_own(kind.layer.parameters()),
                trained=_own(p for p in kind.layer.parameters() if p.requires_grad),
            )
            for kind in short.kinds
        )
        yield dataclasses.replace(
            short,
            notes=tuple(str(one.message) for one in told),
            kinds=kinds,
            embedding_parameters=_own(embedding),
            head_parameters=_own(set(model.parameters()) - inside - embedding),
            projection_parameters=0 if projection is None else _own([projection.weight]),
            vocabulary=short.vocabulary if projection is None else local_part(projection.weight).shape[0],
        )


def _own(parameters: Iterable[nn.Parameter]) -> int:
    return sum(local_part(parameter).numel() for parameter in parameters)
