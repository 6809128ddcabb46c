"""Masks packed to bits and back, in every type, at every length."""

from __future__ import annotations

import pytest
import torch

from memo.errors import UsageError
from memo.kernels import pack_mask, unpack_mask
from memo.kernels.masks import mask_nbytes, pack_mask_reference, unpack_mask_reference

DTYPES = (torch.bool, torch.uint8, torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 9, 77, 80, 4096, 5000, 39_961)


def _mask(count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    torch.manual_seed(count)
    return (torch.rand(count) < 0.4).to(dtype).to(device)


def test_the_layout_is_the_lowest_bit_first() -> None:
    mask = torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    assert pack_mask(mask).tolist() == [0b10000001, 0b00000010]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000, 1001])
def test_what_is_packed_comes_back(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    mask = (torch.rand(count) < 0.5).to(dtype)
    bits = pack_mask(mask)
    assert bits.numel() == mask_nbytes(count)
    assert torch.equal(unpack_mask(bits, torch.full_like(mask, 1)), mask)


def test_anything_but_zero_is_one() -> None:
    assert pack_mask(torch.tensor([2.5, -0.0, 0.0, -1.0, float("nan")])).tolist() == [0b11001]


def test_the_bits_of_another_mask_are_refused() -> None:
    with pytest.raises(UsageError, match="17 elements is 3 uint8"):
        unpack_mask(torch.zeros(2, dtype=torch.uint8), torch.zeros(17))
    with pytest.raises(UsageError, match="contiguous memory"):
        unpack_mask(torch.zeros(1, dtype=torch.uint8), torch.zeros(2, 3).T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_the_kernel_agrees_with_the_reference(count: int, dtype: torch.dtype, device: torch.device) -> None:
    from memo.kernels import masks_triton

    mask = _mask(count, dtype, device)
    bits = masks_triton.pack(mask)
    assert torch.equal(bits, pack_mask_reference(mask))

    whole, other = (torch.ones(count + 3, dtype=dtype, device=device) for _ in range(2))
    masks_triton.unpack(bits, whole[1:-2])
    unpack_mask_reference(bits, other[1:-2])
    assert torch.equal(whole, other)
    assert torch.equal(whole[1:-2], mask)


@pytest.mark.gpu
def test_a_mask_that_is_not_contiguous_is_copied_first(device: torch.device) -> None:
    from memo.kernels import masks_triton

    mask = _mask(180, torch.bool, device).view(5, 9, 4).permute(2, 0, 1)
    assert torch.equal(masks_triton.pack(mask), pack_mask_reference(mask))


@pytest.mark.gpu
def test_anything_but_zero_is_one_in_the_kernel(device: torch.device) -> None:
    from memo.kernels import masks_triton

    assert masks_triton.pack(torch.tensor([2.5, -0.0, 0.0, -1.0, float("nan")], device=device)).tolist() == [0b11001]
