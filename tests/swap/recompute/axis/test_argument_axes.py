"""Token axes of a layer's arguments where others are as long: chosen by length and order, then proven."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from small_models import Block, assert_equal, ids, stack, train
from torch import nn
from torch.nn import functional as F

import memo
from memo.swap.recompute.axis.argument_axes import token_axes
from memo.swap.recompute.axis.token_axis import Axis

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

S = 8


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, S, 4), [1]),
        ((3, 7, 4), []),
        ((S, S, 4), [1]),  # as many sequences
        ((S, S, 1, 4), [1]),
        ((1, S, S), [1, 2]),  # a mask, or a table
        ((S, 1, S, S), [2, 3]),  # a mask of as many sequences
        ((S, S), [0, 1]),
    ],
)
def test_dimensions_that_run_over_the_tokens(shape: tuple[int, ...], expected: list[int]) -> None:
    assert [axis.dim for axis in token_axes(shape, S)] == expected


def test_the_tokens_of_several_ranks_are_rank_after_rank() -> None:
    assert token_axes((3, 2 * S, 4), S, joined=[2]) == [Axis(dim=1, outer=2)]
    assert token_axes((3, 2 * S, 4), S) == []


class Told(Block):
    """A block that is told something of every token, or so it seems."""

    use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(type(self).use(x, table))


class Row(Told):
    use = staticmethod(lambda x, table: x * table)


class Column(Told):
    use = staticmethod(lambda x, table: x * table.transpose(1, 2))


class ColumnNorm(Told):
    use = staticmethod(lambda x, table: x + F.layer_norm(table.transpose(1, 2), (x.size(2),)))


class ColumnSum(Told):
    use = staticmethod(lambda x, table: x * table.sum(1, keepdim=True).sigmoid())


class ColumnSort(Told):
    use = staticmethod(lambda x, table: x * table.sort(1).values)


class Turned(Told):
    use = staticmethod(lambda x, table: (x.transpose(1, 2) * table).transpose(1, 2))


def told(kind: type[Told]) -> nn.Module:
    model = stack(layers=2, make=lambda: kind(32, 2))

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        seq, hidden = tokens.size(1), 32
        table = torch.linspace(-1, 1, seq * hidden).view(1, seq, hidden)
        if seq != hidden and kind in (Column, ColumnNorm, Turned):
            table = table.transpose(1, 2)
        x = model.embed(tokens)
        for layer in model.layers:
            x = layer(x, table)
        return F.cross_entropy((x @ model.embed.weight.t()).flatten(0, 1), tokens.flatten())

    model.forward = forward  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("lengths", [(32, 32, 32), (24, 32, 32)], ids=str)
@pytest.mark.parametrize(
    "kind", [Row, Column, ColumnNorm, ColumnSum, ColumnSort, Turned], ids=lambda kind: kind.__name__
)
def test_a_square_table_is_cut_by_tokens_or_its_layer_moves_whole(
    kind: type[Told], lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """As many tokens as features, also after a length at which they differed."""
    model, reference = told(kind), told(kind)
    manager = memo.offload(model, disk=tmp_path, min_bytes=64, alpha=0.25)

    def steps(module: nn.Module) -> Callable[[int], torch.Tensor]:
        return lambda step: module(ids(step, seq=lengths[step]))  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*whole")
        assert_equal(train(model, steps(model), manager), train(reference, steps(reference)))
    use = manager.report().recompute
    assert use is not None
    if kind is Row:
        assert not use.refused, use
        assert manager.stats.bytes_recomputed > 0
    manager.close()
