"""Token ranges packed and unpacked: bytes are exact, codes keep their stated bound, nothing else is touched."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from memo.errors import UsageError
from memo.kernels import staging
from memo.kernels.codec import GROUP, LARGEST, SMALLEST, Codec, error_bound
from memo.kernels.staging import (
    coded_error,
    pack_reference,
    pack_views,
    staging_nbytes,
    staging_offsets,
    unpack_reference,
    unpack_views,
)
from memo.mip.inputs.coding import CHECKED_VALUES, CODE_BYTES, CODECS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODES = (Codec.INT8, Codec.FP8)


def _views(seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Token ranges of random storages, heads and tails, odd sizes among them."""
    draw, values = random.Random(seed), torch.Generator().manual_seed(seed)
    views = []
    for _ in range(draw.randint(1, 6)):
        rows, tokens, width = draw.randint(1, 5), draw.randint(2, 40), draw.choice([1, 3, 8, 17, 32, 64, 128])
        block = torch.randn(rows, tokens, width, generator=values).to(dtype)
        # Magnitudes from far below the rest of a group to far above it.
        block *= torch.pow(10.0, torch.randint(-4, 3, block.shape, generator=values)).to(dtype)
        first = draw.randint(0, tokens - 1)
        views.append(block.to(device)[:, :first] if draw.random() < 0.5 else block.to(device)[:, first:])
    return views


def _filled(views: Sequence[torch.Tensor], codec: Codec, byte: int) -> torch.Tensor:
    device = views[0].device
    return torch.full((staging_nbytes(views, codec) + 5,), byte, dtype=torch.uint8, device=device)


def _blank(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A storage of the value 3 around a view that lies as `view` does: (storage, view)."""
    whole = torch.full((view.untyped_storage().nbytes() // view.itemsize,), 3, dtype=view.dtype, device=view.device)
    return whole, whole.as_strided(view.shape, view.stride(), view.storage_offset())


def test_a_literal_block() -> None:
    first = torch.arange(12, dtype=torch.int32).view(2, 3, 2)[:, 1:]
    second = torch.tensor([[7, 8], [9, 10]], dtype=torch.uint8)[:, :1]
    assert staging_offsets([first, second]) == [(0, 32), (32, 2)]
    block = torch.zeros(34, dtype=torch.uint8)
    pack_views([first, second], block)
    assert block[:32].view(torch.int32).tolist() == [2, 3, 4, 5, 8, 9, 10, 11]
    assert block[32:].tolist() == [7, 9]


def test_every_tensor_begins_where_a_vector_access_may() -> None:
    views = [torch.zeros(count, dtype=torch.uint8) for count in (3, 16, 17, 1)]
    assert staging_offsets(views) == [(0, 3), (16, 16), (32, 17), (64, 1)]
    halves = [torch.zeros(count, dtype=torch.bfloat16) for count in (129, 1)]
    # 129 codes, to the next multiple of 16, then two scales; to the next multiple again.
    assert staging_offsets(halves, Codec.INT8) == [(0, 144 + 8), (160, 16 + 4)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.uint8, torch.bool])
def test_exact_bytes_come_back_and_no_others_change(seed: int, dtype: torch.dtype) -> None:
    views = _views(seed, dtype)
    block = _filled(views, Codec.EXACT, 0)
    pack_views(views, block)
    assert not block[-5:].any()
    copies = [_blank(view) for view in views]
    unpack_views(block, [view for _, view in copies])
    for view, (whole, copy) in zip(views, copies, strict=True):
        assert torch.equal(copy, view)
        outside = torch.ones_like(whole, dtype=torch.bool)
        outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        assert (whole[outside] == torch.full((), 3, dtype=dtype)).all()


@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_keep_their_stated_bound(codec: Codec, dtype: torch.dtype) -> None:
    worst = 0.0
    for seed in range(30):
        views = _views(seed, dtype)
        block = _filled(views, codec, 0)
        pack_views(views, block, codec=codec)
        copies = [torch.empty_like(view) for view in views]
        unpack_views(block, copies, codec=codec)
        for view, copy in zip(views, copies, strict=True):
            off = (copy.double() - view.double()).abs().flatten()
            bound = error_bound(view.flatten(), codec)
            assert (off <= bound).all()
            worst = max([worst, *(off / bound).tolist()])
    assert worst > 0.9  # the bound is nearly reached: it is no wider than it must be


@pytest.mark.parametrize("codec", CODES)
def test_codes_halve_bfloat16(codec: Codec) -> None:
    view = torch.randn(4, 1000, 128).bfloat16()
    exact = staging_nbytes([view])
    assert staging_nbytes([view], codec) == exact // 2 + exact // 2 // GROUP * 4


@pytest.mark.parametrize("codec", CODES)
def test_zeros_and_the_tiniest_values_come_back_within_the_bound(codec: Codec) -> None:
    view = torch.zeros(2 * GROUP)
    view[GROUP:] = SMALLEST / 1000
    block = _filled([view], codec, 255)
    pack_views([view], block, codec=codec)
    copy = torch.ones_like(view)
    unpack_views(block, [copy], codec=codec)
    assert not copy[:GROUP].any()
    assert ((copy - view).abs() <= SMALLEST / 254).all()


@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.9 * LARGEST])
def test_a_group_that_cannot_be_coded_is_nan_and_its_neighbours_are_not(codec: Codec, value: float) -> None:
    view = torch.ones(3 * GROUP)
    view[GROUP + 5] = value
    block = _filled([view], codec, 0)
    pack_views([view], block, codec=codec)
    copy = torch.empty_like(view)
    unpack_views(block, [copy], codec=codec)
    assert copy[GROUP : 2 * GROUP].isnan().all()
    assert torch.equal(copy[:GROUP], view[:GROUP])
    assert torch.equal(copy[2 * GROUP :], view[2 * GROUP :])


@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_the_same_found_piece_by_piece(
    dtype: torch.dtype, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(9 * GROUP + 5).to(dtype)
    values[3 * GROUP] = float("nan")
    block = _filled([values], codec, 0)
    pack_views([values], block, codec=codec)
    whole = coded_error(values, block, codec)
    monkeypatch.setattr(staging, "CHECKED", 2 * GROUP)
    assert torch.equal(coded_error(values, block, codec), whole)
    assert whole[0] == 1
    off = (values.float() - decoded(values, block, codec)).abs().nan_to_num(0.0)
    groups = torch.nn.functional.pad(torch.stack([off, values.float().abs()]), (0, -len(values) % GROUP))
    largest = groups.view(2, -1, GROUP).amax(dim=2)[0] / groups.view(2, -1, GROUP).nan_to_num(0.0).amax(dim=2)[1]
    assert whole[1].item() == pytest.approx(largest.nan_to_num(0.0).amax().item(), rel=1e-5)


def decoded(values: torch.Tensor, block: torch.Tensor, codec: Codec) -> torch.Tensor:
    copy = torch.empty_like(values)
    unpack_views(block, [copy], codec=codec)
    return copy.float()


def test_plans_count_the_bytes_of_codes() -> None:
    for codec in CODES:
        assert codec.nbytes(8 * GROUP, 4) == CODE_BYTES * 8 * GROUP
        assert codec.name.lower() in CODECS
    assert staging.CHECKED == CHECKED_VALUES


@pytest.mark.parametrize("codec", CODES)
def test_only_floating_types_have_codes(codec: Codec) -> None:
    with pytest.raises(UsageError, match=r"not torch\.int32"):
        staging_nbytes([torch.zeros(4, dtype=torch.int32)], codec)


def test_a_short_block_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 16 uint8"):
        pack_views([torch.zeros(4)], torch.zeros(15, dtype=torch.uint8))
    with pytest.raises(UsageError, match="at least 16 uint8"):
        unpack_views(torch.zeros(8), [torch.zeros(4)])


@pytest.mark.gpu
@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_writes_the_bytes_of_the_reference(
    seed: int, dtype: torch.dtype, codec: Codec, device: torch.device
) -> None:
    from memo.kernels import staging_triton

    views = _views(seed, dtype, device)
    expected, block = _filled(views, codec, 7), _filled(views, codec, 7)
    pack_reference(views, expected, codec)
    staging_triton.pack(views, block, codec)
    assert torch.equal(block, expected)

    wholes, copies = zip(*map(_blank, views), strict=True)
    theirs, their_copies = zip(*map(_blank, views), strict=True)
    staging_triton.unpack(block, copies, codec)
    unpack_reference(expected, their_copies, codec)
    for whole, other in zip(wholes, theirs, strict=True):
        assert torch.equal(whole, other)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODES)
def test_the_kernel_rounds_every_code_as_the_reference(codec: Codec, device: torch.device) -> None:
    from memo.kernels import staging_triton

    # The points halfway between neighbouring codes, their neighbours in float32, both signs, and what has no code.
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:-1]
    steps = codes if codec is Codec.FP8 else torch.arange(128.0)
    halfway = (steps[1:] + steps[:-1]) / 2
    points = torch.cat([steps, halfway, halfway.nextafter(torch.tensor(0.0)), halfway.nextafter(torch.tensor(1e9))])
    points = torch.cat([points, -points])
    groups = torch.nn.functional.pad(points, (0, -len(points) % (GROUP - 1))).view(-1, GROUP - 1)
    view = torch.nn.functional.pad(groups, (0, 1), value=codec.top).flatten()  # the scale is exactly one
    broken = torch.ones(4 * GROUP)
    broken[[3, GROUP + 1, 3 * GROUP]] = torch.tensor([float("nan"), float("inf"), 1.9 * LARGEST])
    views = [view.to(device), broken.to(device), torch.full((200,), SMALLEST / 7, device=device)]
    expected, block = _filled(views, codec, 0), _filled(views, codec, 0)
    pack_reference(views, expected, codec)
    staging_triton.pack(views, block, codec)
    # NaN has many bit patterns: scales are compared as numbers.
    for one, (offset, nbytes) in zip(views, staging_offsets(views, codec), strict=True):
        mine, theirs = block[offset : offset + nbytes], expected[offset : offset + nbytes]
        assert torch.equal(mine[: one.numel()], theirs[: one.numel()])
        begin = codec.scales_offset(one.numel())
        scales = (part[begin:].clone().view(torch.float32) for part in (mine, theirs))
        torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("misplaced", range(1, 16))
def test_addresses_at_any_byte_are_copied_whole(misplaced: int, device: torch.device) -> None:
    from memo.kernels import staging_triton

    source = torch.arange(3 * 97, dtype=torch.int64).to(torch.uint8).to(device)
    view = source[misplaced : misplaced + 240].view(3, 80)[:, : 80 - misplaced]
    block = torch.zeros(256 + misplaced, dtype=torch.uint8, device=device)[misplaced:]
    staging_triton.pack([view, source[:1]], block, Codec.EXACT)
    assert torch.equal(block[: view.numel()], view.flatten())
    back = torch.zeros_like(source)
    copy = back[misplaced : misplaced + 240].view(3, 80)[:, : 80 - misplaced]
    staging_triton.unpack(block, [copy], Codec.EXACT)
    assert torch.equal(copy, view)
    assert not back[:misplaced].any()
    assert not back[misplaced + 240 :].any()


@pytest.mark.gpu
def test_a_view_that_is_no_rows_of_runs_is_refused(device: torch.device) -> None:
    from memo.kernels import staging_triton

    for view in (torch.zeros(4, 5, device=device).T, torch.zeros(3, 4, 5, device=device)[:2, :2, :2]):
        with pytest.raises(UsageError, match="rows of contiguous runs"):
            staging_triton.pack([view], torch.zeros(80, dtype=torch.uint8, device=device), Codec.EXACT)
