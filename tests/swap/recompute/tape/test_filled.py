"""Bytes of uninitialised memory that operators have written, against a storage of which every byte is counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from memo.swap.recompute.tape.filled import Region, covers, region_of


class Written:
    """What was written of a tensor's storage."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def wrote(self, tensor: torch.Tensor) -> None:
        region = region_in_storage(tensor)
        if region is not None:
            self.regions.append(region)

    def lacks(self, tensor: torch.Tensor) -> bool:
        region = region_in_storage(tensor)
        return tensor.numel() > 0 and (region is None or not covers(self.regions, region))


def region_in_storage(tensor: torch.Tensor) -> Region | None:
    item = tensor.itemsize
    return region_of(
        tensor.untyped_storage().nbytes(),
        tensor.storage_offset() * item,
        tuple(tensor.size()),
        tuple(stride * item for stride in tensor.stride()),
        item,
    )


SHAPE = (2, 3, 4, 8)
WHOLE = slice(None)
parts = st.sampled_from([WHOLE, slice(None, 1), slice(1, None), slice(0, None, 2), slice(1, None, 2), slice(1, 3)])
views = st.tuples(parts, parts, parts, parts)


@given(written=st.lists(views, max_size=5), wanted=views, order=st.permutations([0, 1, 2, 3]))
@settings(max_examples=300, deadline=None)
def test_what_operators_wrote_is_counted_to_the_byte(
    written: list[tuple[slice, ...]], wanted: tuple[slice, ...], order: list[int]
) -> None:
    tensor = torch.zeros(SHAPE, dtype=torch.int16)
    filled = Written()
    for view in written:
        tensor[view] = 1
        filled.wrote(tensor[view].permute(order))
    assert filled.lacks(tensor[wanted].permute(order)) == bool((tensor[wanted] == 0).any())


@given(width=st.integers(1, 7), halves=st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_row_in_two_parts_is_whole_however_many_rows_there_are(width: int, halves: bool) -> None:
    tensor = torch.empty(50_000, 8)
    filled = Written()
    one, other = (tensor[:, 0::2], tensor[:, 1::2]) if halves else (tensor[:, :width], tensor[:, width:])
    filled.wrote(one)
    assert filled.lacks(tensor)
    assert not filled.lacks(one)
    filled.wrote(other)
    assert not filled.lacks(tensor)


def test_what_lies_in_too_many_pieces_counts_as_unwritten() -> None:
    tensor = torch.empty(50_000, 8)
    filled = Written()
    filled.wrote(tensor[:25_000, :4])
    assert filled.lacks(tensor[:25_000, :4])
    filled.wrote(tensor)
    assert not filled.lacks(tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_memory_of_one_element_or_none(shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape)
    filled = Written()
    assert filled.lacks(tensor) == (tensor.numel() > 0)
    filled.wrote(tensor)
    assert not filled.lacks(tensor)


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("shape", [(2, 16, 4096, 192), (1, 128, 8192, 192), (3, 4096, 8, 24)], ids=str)
def test_slices_along_one_dimension_fill_a_tensor_of_any_size(shape: tuple[int, ...], dim: int) -> None:
    """As keys are put together of a part with positions and a part without."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    filled = Written()
    first = shape[dim] // 3
    if first:
        filled.wrote(tensor.narrow(dim, 0, first))
        assert filled.lacks(tensor)
    filled.wrote(tensor.narrow(dim, first, shape[dim] - first))
    assert not filled.lacks(tensor)
