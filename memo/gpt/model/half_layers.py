"""A layer in two halves of its rows, whose tensor-parallel collectives run beside each other's computation.

Owns the division into halves and their steps; memo.gpt.half_order has the order of the steps. Halves are of the sequences;
of one sequence, the MLP's are of its tokens. Rows do not depend on one another, so the output is that of the layer as a
whole; gradients of weights are sums of the two halves'. Dropout draws for each half.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from memo.gpt.half_order import MLP_ALONE, WHOLE_LAYER
from memo.gpt.model.packed_documents import DocumentSpans
from memo.gpt.model.rotary import RotaryTables
from memo.gpt.model.tiled_mlp import tiled_part
from memo.parallel import begin_entry, begin_row_sum, own_parts, parameters_once

if TYPE_CHECKING:
    from memo.gpt.model.model import Block, Mlp

Half = Generator[None, None, torch.Tensor]
"""Steps of one half; returns its output."""


def run_in_halves(
    layer: Block, x: torch.Tensor, rotary: RotaryTables | None = None, spans: DocumentSpans | None = None
) -> torch.Tensor:
    """Output of a layer divided by memo's tensor parallelism; arguments as the layer's."""
    with parameters_once(layer):
        if len(x) == 1:
            x = x + layer.dropout(layer.attention(layer.norm1(x), rotary, spans))
            return torch.cat(_interleaved([_mlp(layer, half) for half in x.chunk(2, dim=1)], MLP_ALONE), dim=1)
        halves, first = [], 0
        # In this order gradients of `x` are added up in that of the layer as a whole.
        for entering, half in zip(layer.norm1(x).chunk(2), x.chunk(2), strict=True):
            tables, documents = rotary, spans
            if spans is not None:
                rows = slice(first, first + len(half))
                documents = spans.of_rows(first, len(half))
                tables = None if rotary is None else (rotary[0][rows], rotary[1][rows])
            halves.append(_layer(layer, half, entering, tables, documents))
            first += len(half)
        return torch.cat(_interleaved(halves, WHOLE_LAYER))


def _layer(
    layer: Block,
    x: torch.Tensor,
    entering: torch.Tensor,
    rotary: RotaryTables | None,
    spans: DocumentSpans | None,
) -> Half:
    attention = layer.attention
    entered = begin_entry(attention.qkv, entering)
    yield
    mixed = attention.mix(entered(), rotary, spans)
    yield
    summed = begin_row_sum(attention.out, F.linear(mixed, own_parts(attention.out)[0]))
    yield
    return (yield from _mlp(layer, x + layer.dropout(summed())))


def _mlp(layer: Block, x: torch.Tensor) -> Half:
    mlp = cast("Mlp", layer.mlp)
    entered = begin_entry(mlp.up, layer.norm2(x))
    yield
    if mlp.tiles > 1:
        part = tiled_part(entered(), tiles=mlp.tiles, activation=mlp.activation, wide=mlp.wide, down=mlp.down)
        yield
    else:
        wide = mlp.widen(entered())
        yield
        part = F.linear(wide, own_parts(mlp.down)[0])
    summed = begin_row_sum(mlp.down, part)
    yield
    return x + cast("torch.Tensor", layer.dropout(summed()))


def _interleaved(halves: Sequence[Half], order: str) -> list[torch.Tensor]:
    """Outputs of the two halves, after their steps in this order."""
    done: dict[int, torch.Tensor] = {}
    for letter in order:
        number = "ab".index(letter)
        try:
            next(halves[number])
        except StopIteration as ended:
            done[number] = ended.value
    return [done[0], done[1]]
