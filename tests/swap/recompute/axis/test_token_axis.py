"""Token axes of tensors and storages, against tensors whose every element is its token's number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from memo.swap.recompute.axis.token_axis import Axis, cut, layout_of_part, regroup, rows_of

TOKENS = 5


def numbered(outer: int, inner: int, before: int, after: int, tokens: int = TOKENS) -> torch.Tensor:
    """(before, outer * tokens * inner, after) contiguous; each element is its token's number."""
    number = torch.arange(tokens).view(1, 1, tokens, 1, 1).expand(before, outer, tokens, inner, after)
    return number.reshape(before, outer * tokens * inner, after).contiguous()


small = st.integers(1, 3)


@given(outer=small, inner=small, before=small, after=small, order=st.permutations([0, 1, 2]))
@settings(max_examples=60, deadline=None)
def test_rows_give_each_token_its_own_bytes(outer: int, inner: int, before: int, after: int, order: list[int]) -> None:
    tensor = numbered(outer, inner, before, after).permute(order)
    rows = rows_of(tensor, Axis(dim=order.index(1), outer=outer, inner=inner), TOKENS)
    assert rows is not None
    block = torch.empty(0, dtype=torch.int64).set_(tensor.untyped_storage()).view(rows.rows, TOKENS, -1)
    assert block.size(2) * 8 == rows.width
    assert torch.equal(block, torch.arange(TOKENS).view(1, -1, 1).expand_as(block))


@given(
    outer=small,
    inner=small,
    before=small,
    after=small,
    order=st.permutations([0, 1, 2]),
    span=st.tuples(st.integers(0, 4), st.integers(1, 5)).filter(lambda span: span[0] < span[1]),
)
@settings(max_examples=60, deadline=None)
def test_a_cut_is_what_a_forward_over_those_tokens_would_make(
    outer: int, inner: int, before: int, after: int, order: list[int], span: tuple[int, int]
) -> None:
    first, stop = span
    tensor = numbered(outer, inner, before, after).permute(order)
    axis = Axis(dim=order.index(1), outer=outer, inner=inner)
    alone = (numbered(outer, inner, before, after, stop - first) + first).permute(order)
    part = cut(tensor, axis, first, stop, TOKENS)
    assert torch.equal(part, alone)
    assert [s for s, n in zip(part.stride(), part.shape, strict=True) if n > 1] == [
        s for s, n in zip(alone.stride(), alone.shape, strict=True) if n > 1
    ]
    rows = rows_of(tensor, axis, TOKENS)
    assert rows is not None
    assert layout_of_part(tensor, axis, rows, stop - first, TOKENS).fits(alone)


@given(outer=small, inner=small, before=small, after=small, split=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_view_carries_the_axis_along(outer: int, inner: int, before: int, after: int, split: bool) -> None:
    tensor = numbered(outer, inner, before, after)
    axis = Axis(dim=1, outer=outer, inner=inner)
    new = [before * outer, TOKENS, inner * after] if split else [before * outer * TOKENS * inner * after]
    found = regroup(tensor.shape, axis, new, TOKENS)
    assert found is not None
    view = tensor.view(new)
    parts = view.unflatten(found.dim, (found.outer, TOKENS, found.inner)).movedim(found.dim + 1, 0).reshape(TOKENS, -1)
    assert torch.equal(parts, torch.arange(TOKENS).view(-1, 1).expand_as(parts))


def test_a_view_across_tokens_has_no_axis() -> None:
    assert regroup((4, 6), Axis(dim=1), (8, 3), 6) is None  # a row of three is half of the six tokens
    assert regroup((4, 6), Axis(dim=1), (3, 8), 6) is None


@pytest.mark.parametrize(
    ("tensor", "axis"),
    [
        (torch.zeros(4, 6)[:, 1:], Axis(dim=1)),  # a part of the tokens
        (torch.zeros(4, 1).expand(4, 6), Axis(dim=1)),  # one element for all of them
        (torch.zeros(40)[:24].view(4, 6), Axis(dim=1)),  # a storage with more behind
        (torch.zeros(6, 6).as_strided((6, 6), (1, 1)), Axis(dim=0)),  # tokens overlap
    ],
)
def test_bytes_that_are_not_proven_are_not_divided(tensor: torch.Tensor, axis: Axis) -> None:
    assert rows_of(tensor, axis, tensor.size(axis.dim)) is None


def test_a_chunk_of_a_fused_projection_divides_the_whole_of_it() -> None:
    query, _, _ = torch.zeros(2, 6, 12).chunk(3, -1)
    rows = rows_of(query, Axis(dim=1), 6)
    assert rows is not None
    assert (rows.rows, rows.width) == (2, 48)
