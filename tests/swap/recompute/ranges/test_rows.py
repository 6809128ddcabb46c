"""Rows of a tape: which steps may run on a part of the tokens, and how what they make is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from taped import Taped, record
from torch.nn import functional as F

from memo.swap.recompute.axis.token_axis import Axis, cut
from memo.swap.recompute.ranges.rows import TokenRows, token_layouts
from memo.swap.recompute.tape.tape import uses_in

TOKENS, BATCH, HIDDEN = 48, 2, 16


def read(function: Any, hidden: torch.Tensor, *given: torch.Tensor) -> tuple[Taped, TokenRows]:
    """The usual reading of a recorded call."""
    taped = record(function, hidden, *given)
    return taped, next(iter(token_layouts(taped.tape, taped.recorder.carried)))


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (BATCH, TOKENS, HIDDEN)), requires_grad=True)


def axis_of(taped: Taped, rows: TokenRows, name: str, which: int = 0) -> Axis | None:
    """Axis of the first result of a step."""
    use = uses_in(taped.step(name, which).out)[0]
    return rows.axes.get((use.value, use.content))


def test_the_axis_is_carried_through_views_and_products() -> None:
    weight = torch.nn.Parameter(torch.randn(3 * HIDDEN, HIDDEN))

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, weight).unflatten(-1, (4, -1)).transpose(1, 2).chunk(3, -1)
        return (q * k * v).exp()

    taped, rows = read(layer, hidden())
    assert axis_of(taped, rows, "aten.mm") == Axis(dim=0, outer=BATCH)
    assert axis_of(taped, rows, "aten.exp") == Axis(dim=2)
    assert not rows.mixes


def test_what_mixes_tokens_never_runs_on_a_part_and_the_axis_begins_anew() -> None:
    taped, rows = read(lambda x: x.exp().flip(1).sin().cumsum(1).tanh(), hidden())
    assert {taped.tape.steps[step].name for step in rows.mixes} == {"aten.flip", "aten.cumsum"}
    assert axis_of(taped, rows, "aten.flip") == axis_of(taped, rows, "aten.tanh") == Axis(dim=1)


def test_where_sizes_do_not_tell_the_axis_is_that_of_the_arguments() -> None:
    taped, rows = read(lambda x: x.unflatten(-1, (TOKENS, -1)).flip(1).exp(), hidden(BATCH, TOKENS, 2 * TOKENS))
    assert taped.step("aten.flip").number in rows.mixes
    assert axis_of(taped, rows, "aten.exp") == Axis(dim=1)


def test_attention_is_kept_and_its_result_runs_over_the_queries() -> None:
    """Also where there are as many heads as tokens."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (TOKENS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).exp()

    taped, rows = read(layer, hidden(BATCH, TOKENS, 2 * TOKENS))
    name = next(step.name for step in taped.tape.steps if "attention" in step.name)
    assert taped.step(name).number in rows.mixes
    assert axis_of(taped, rows, "aten.exp") == Axis(dim=2)


def test_a_change_in_place_that_mixes_tokens_is_kept_and_later_contents_are_divided() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.cumsum_(1)
        return y.mul_(2).sin()

    taped, rows = read(layer, hidden())
    assert list(rows.mixes) == [taped.step("aten.cumsum_").number]
    assert axis_of(taped, rows, "aten.sin") == Axis(dim=1)


def test_a_mask_over_pairs_of_tokens_is_cut_by_its_queries() -> None:
    taped, rows = read(lambda x, mask: (x @ x.mT + mask).exp(), hidden(), torch.randn(BATCH, TOKENS, TOKENS))
    assert [taped.tape.steps[step].name for step in rows.mixes] == ["aten.bmm"]
    assert axis_of(taped, rows, "aten.exp") == Axis(dim=1)


def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention written out; the mask is added."""
    q, k, v = x.sin(), x.cos(), x.exp()
    return ((q @ k.mT + mask).softmax(-1) @ v).tanh()


@pytest.mark.parametrize("mask", [(BATCH, TOKENS, TOKENS), (TOKENS, TOKENS), (BATCH, 1, TOKENS), (TOKENS, 1)], ids=str)
def test_attention_written_out_is_divided_by_queries_once_all_keys_are_there(mask: tuple[int, ...]) -> None:
    taped = record(attend, hidden(BATCH, TOKENS, HIDDEN // 2), torch.randn(mask))
    usual, rows = token_layouts(taped.tape, taped.recorder.carried)
    first, second = (taped.step("aten.bmm", which) for which in (0, 1))
    keys = taped.step("aten.cos")
    assert {first.number, second.number} <= set(usual.mixes)
    assert rows.mixes.keys() == {second.number, keys.number}
    assert set(keys.makes) <= rows.whole
    assert axis_of(taped, rows, "aten._softmax") == axis_of(taped, rows, "aten.bmm") == Axis(dim=1)
    assert rows.rows.keys().isdisjoint(rows.whole)


@pytest.mark.parametrize("added", [(BATCH, 1, TOKENS), (1, 1, 1), (BATCH, TOKENS, TOKENS)], ids=str)
def test_products_onto_which_something_is_added_are_divided_by_queries(added: tuple[int, ...]) -> None:
    """As slopes over the keys are."""
    taped = record(lambda x, bias: torch.baddbmm(bias, x.sin(), x.cos().mT).exp(), hidden(), torch.randn(added))
    _, rows = token_layouts(taped.tape, taped.recorder.carried)
    assert axis_of(taped, rows, "aten.baddbmm") == axis_of(taped, rows, "aten.exp") == Axis(dim=1)
    assert taped.step("aten.baddbmm").number not in rows.mixes


def test_distances_between_tokens_are_divided_by_queries() -> None:
    def layer(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        positions = x[0, :, 0].detach().round().long()
        return x + F.embedding((positions[:, None] - positions.abs()[None]).abs() % 7, table).sum(1)

    taped = record(layer, hidden(), torch.randn(7, HIDDEN))
    _, rows = token_layouts(taped.tape, taped.recorder.carried)
    assert axis_of(taped, rows, "aten.sub") == Axis(dim=0)
    assert axis_of(taped, rows, "aten.embedding") == Axis(dim=0)


def test_products_with_as_few_bytes_as_their_factors_are_not_read_so() -> None:
    """They are kept, and their right factor may be divided."""
    taped = record(lambda x: (x.sin().mT @ x.cos()).mT.exp(), hidden(BATCH, TOKENS, 2 * TOKENS))
    assert all(not rows.whole for rows in token_layouts(taped.tape, taped.recorder.carried))


def test_what_is_made_of_parameters_alone_is_the_same_for_all_tokens() -> None:
    weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN))
    taped, rows = read(lambda x: x @ (weight * 2).cos(), hidden())
    assert {content for name in ("aten.mul", "aten.cos") for content in taped.step(name).makes} <= rows.same
    assert axis_of(taped, rows, "aten.mm") == Axis(dim=0, outer=BATCH)


def test_sequence_first_is_read_by_its_first_dimension() -> None:
    taped, rows = read(lambda x: x.exp(), hidden(TOKENS, BATCH, HIDDEN))
    assert rows.tokens == TOKENS
    assert axis_of(taped, rows, "aten.exp") == Axis(dim=0)


def test_too_few_tokens_are_not_read() -> None:
    assert list(token_layouts(record(lambda x: x.exp(), hidden(2, 16, HIDDEN)).tape)) == []


def test_a_size_among_the_arguments_follows_the_tokens() -> None:
    taped, rows = read(lambda x: x * x.new_full((BATCH, TOKENS, 1), 3.0), hidden())
    step = taped.step("aten.new_full")
    assert rows.args_of(step, 16)[1] == [BATCH, 16, 1]
    assert rows.args_of(step, TOKENS) == list(step.args)


@pytest.mark.parametrize("lies", ["contiguous", "transposed", "a part of each row"])
def test_the_geometry_of_a_part_is_that_of_a_computation_on_its_tokens(lies: str) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y = {"contiguous": y, "transposed": y.transpose(0, 1), "a part of each row": y[..., 4:12]}[lies]
        return y.sin()

    taped, rows = read(layer, hidden())
    use = uses_in(taped.step("aten.sin").args)[0]
    block = torch.arange(BATCH * TOKENS * HIDDEN, dtype=torch.float32)
    _, offset, size, stride, _ = taped.tape.geometry(use.value)
    axis = rows.axes[use.value, use.content]
    want = cut(block.as_strided(size, stride, offset), axis, 8, 32, TOKENS)
    _, offset, size, stride, _ = rows.geometry(use.value, use.content, 24)
    part = block.view(BATCH, TOKENS, HIDDEN)[:, 8:32].reshape(-1)
    assert torch.equal(part.as_strided(size, stride, offset), want)
    assert rows.nbytes(use.content, 24) == part.numel() * 4
