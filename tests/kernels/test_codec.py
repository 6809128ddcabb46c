"""Codes of values: they keep their stated bound, and the kernel writes what the reference writes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from code_bounds import error_bound

from memo.errors import UsageError
from memo.kernels import GROUP, Codec, codec as codecs, coded_error, decode, encode
from memo.kernels.codec import LARGEST, SMALLEST, decode_reference, encode_reference, scales_in
from memo.mip.inputs import CODE_BYTES, CODECS
from memo.mip.inputs.coding import CHECKED_VALUES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _values(seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Some values at any place in memory, of magnitudes from far below the rest of a group to far above it."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, first = draw.choice([1, 3, 127, 128, 129, 1000, 4096, 4097, 9000]), draw.randint(0, 9)
    values = torch.randn(first + count, generator=generator).to(dtype)
    values *= torch.pow(10.0, torch.randint(-4, 3, values.shape, generator=generator)).to(dtype)
    return values.to(device)[first:]


def _filled(values: torch.Tensor, codec: Codec, byte: int) -> torch.Tensor:
    return torch.full((codec.nbytes(values.numel()) + 5,), byte, dtype=torch.uint8, device=values.device)


def _back(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    block, copy = _filled(values, codec, 0), torch.empty_like(values)
    encode(values, block, codec)
    assert not block[-5:].any()
    decode(block, copy, codec)
    return copy


def test_scales_begin_where_a_vector_access_may() -> None:
    assert Codec.INT8.nbytes(129) == 144 + 8  # 129 codes, to the next multiple of 16, then two scales
    assert Codec.FP8.nbytes(1) == 16 + 4
    assert Codec.INT8.nbytes(0) == 0


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_keep_their_stated_bound(codec: Codec, dtype: torch.dtype) -> None:
    worst = 0.0
    for seed in range(40):
        values = _values(seed, dtype)
        off = (_back(values, codec).double() - values.double()).abs()
        bound = error_bound(values, codec)
        assert (off <= bound).all()
        worst = max([worst, *(off / bound).tolist()])
    assert worst > 0.9  # the bound is nearly reached: it is no wider than it must be


@pytest.mark.parametrize("codec", Codec)
def test_zeros_and_the_tiniest_values_come_back_within_the_bound(codec: Codec) -> None:
    values = torch.zeros(2 * GROUP)
    values[GROUP:] = SMALLEST / 1000
    copy = _back(values, codec)
    assert not copy[:GROUP].any()
    assert ((copy - values).abs() <= SMALLEST / 254).all()


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.9 * LARGEST])
def test_a_group_that_cannot_be_coded_is_nan_and_its_neighbours_are_not(codec: Codec, value: float) -> None:
    values = torch.ones(3 * GROUP)
    values[GROUP + 5] = value
    copy = _back(values, codec)
    assert copy[GROUP : 2 * GROUP].isnan().all()
    assert torch.equal(copy[:GROUP], values[:GROUP])
    assert torch.equal(copy[2 * GROUP :], values[2 * GROUP :])


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_the_same_found_piece_by_piece(
    dtype: torch.dtype, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(9 * GROUP + 5).to(dtype)
    values[3 * GROUP] = float("nan")
    block = _filled(values, codec, 0)
    encode(values, block, codec)
    whole = coded_error(values, block, codec)
    monkeypatch.setattr(codecs, "CHECKED", 2 * GROUP)
    assert torch.equal(coded_error(values, block, codec), whole)
    assert whole[0] == 1
    off = (values.float() - _back(values, codec).float()).abs().nan_to_num(0.0)
    groups = torch.nn.functional.pad(torch.stack([off, values.float().abs()]), (0, -len(values) % GROUP))
    largest = groups.view(2, -1, GROUP).amax(dim=2)[0] / groups.view(2, -1, GROUP).nan_to_num(0.0).amax(dim=2)[1]
    assert whole[1].item() == pytest.approx(largest.nan_to_num(0.0).amax().item(), rel=1e-5)


def test_plans_count_the_bytes_of_codes() -> None:
    for codec in Codec:
        assert codec.nbytes(8 * GROUP) == CODE_BYTES * 8 * GROUP
        assert codec.name.lower() in CODECS
    assert codecs.CHECKED == CHECKED_VALUES


@pytest.mark.parametrize(
    ("values", "block", "reason"),
    [
        (torch.zeros(4, dtype=torch.int32), torch.zeros(32, dtype=torch.uint8), r"not torch\.int32"),
        (torch.zeros(4), torch.zeros(19, dtype=torch.uint8), "at least 20 contiguous uint8"),
        (torch.zeros(4), torch.zeros(20), "at least 20 contiguous uint8"),
        (torch.zeros(2, 2), torch.zeros(20, dtype=torch.uint8), "one dimension"),
        (torch.zeros(8)[::2], torch.zeros(20, dtype=torch.uint8), "one dimension"),
        (torch.zeros(4), torch.zeros(40, dtype=torch.uint8)[8:], "a multiple of 16 bytes, not at 8"),
    ],
)
def test_what_cannot_be_coded_is_refused(values: torch.Tensor, block: torch.Tensor, reason: str) -> None:
    for codec in Codec:
        with pytest.raises(UsageError, match=reason):
            encode(values, block, codec)
        with pytest.raises(UsageError, match=reason):
            decode(block, values, codec)


def test_triton_is_not_imported_before_a_launch() -> None:
    code = (
        "import sys, torch, memo.kernels.codec, memo.kernels.masks as masks\n"
        "masks.pack_mask(torch.zeros(2, 3, dtype=torch.bool))\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd="/")


@pytest.mark.gpu
@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_writes_the_bytes_of_the_reference(
    seed: int, dtype: torch.dtype, codec: Codec, device: torch.device
) -> None:
    from memo.kernels import codec_triton

    values = _values(seed, dtype, device)
    expected, block = _filled(values, codec, 7), _filled(values, codec, 7)
    encode_reference(values, expected, codec)
    codec_triton.encode(values, block, codec)
    used = codec.nbytes(values.numel())
    assert torch.equal(block[: values.numel()], expected[: values.numel()])
    assert torch.equal(scales_in(block, values.numel(), codec), scales_in(expected, values.numel(), codec))
    assert (block[used:] == 7).all()

    whole = torch.full((values.numel() + 9,), 3.0, dtype=dtype, device=device)
    theirs = whole.clone()
    codec_triton.decode(block, whole[4:-5], codec)
    decode_reference(expected, theirs[4:-5], codec)
    assert torch.equal(whole, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", Codec)
def test_the_kernel_rounds_every_code_as_the_reference(codec: Codec, device: torch.device) -> None:
    from memo.kernels import codec_triton

    # The points halfway between neighbouring codes, their neighbours in float32, both signs, and what has no code.
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:-1]
    steps = codes if codec is Codec.FP8 else torch.arange(128.0)
    halfway = (steps[1:] + steps[:-1]) / 2
    points = torch.cat([steps, halfway, halfway.nextafter(torch.tensor(0.0)), halfway.nextafter(torch.tensor(1e9))])
    points = torch.cat([points, -points])
    groups = torch.nn.functional.pad(points, (0, -len(points) % (GROUP - 1))).view(-1, GROUP - 1)
    values = torch.nn.functional.pad(groups, (0, 1), value=codec.top).flatten()  # the scale is exactly one
    broken = torch.ones(4 * GROUP)
    broken[[3, GROUP + 1, 3 * GROUP]] = torch.tensor([float("nan"), float("inf"), 1.9 * LARGEST])
    for one in (values.to(device), broken.to(device), torch.full((200,), SMALLEST / 7, device=device)):
        expected, block = _filled(one, codec, 0), _filled(one, codec, 0)
        encode_reference(one, expected, codec)
        codec_triton.encode(one, block, codec)
        assert torch.equal(block[: one.numel()], expected[: one.numel()])
        # NaN has many bit patterns: scales are compared as numbers.
        scales = (scales_in(each, one.numel(), codec) for each in (block, expected))
        torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
