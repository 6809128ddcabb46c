"""Difference between recomputed and saved bytes in a trial, against the formula on whole tensors; and its memory."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from live_bytes import LiveBytes

from memo.swap.levels import comparing_nbytes
from memo.swap.recompute import comparison
from memo.swap.recompute.comparison import have_same_bits, relative_difference
from memo.swap.recompute.trial import BOUND

MIB = 1 << 20
dtypes = st.sampled_from(list(BOUND))


def bytes_of(numbers: torch.Tensor, tokens: int, *, first: int = 0) -> torch.Tensor:
    """(rows, tokens, numbers) as rows x tokens x width, a part of as many tokens from `first` on."""
    return numbers.contiguous().view(torch.uint8)[:, first : first + tokens]


def difference(saved: torch.Tensor, again: torch.Tensor, dtype: torch.dtype) -> float:
    """As a trial finds it, in units of BOUND: bits first, numbers where bits differ."""
    ours, theirs = again.view(saved.size(0), -1), saved.flatten(1)
    if have_same_bits(ours, theirs):
        return 0.0
    if dtype not in BOUND:
        return math.inf
    apart = relative_difference(ours.contiguous().view(dtype), theirs.contiguous().view(dtype))
    return apart / (torch.finfo(dtype).eps * BOUND[dtype])


def by_formula(saved: torch.Tensor, again: torch.Tensor, dtype: torch.dtype) -> float:
    """In units of BOUND, of whole tensors at once."""
    ours, theirs = (t.contiguous().flatten().view(dtype).double() for t in (again, saved))
    scale = theirs.square().mean().sqrt()
    return ((ours - theirs).square().mean().sqrt() / scale / torch.finfo(dtype).eps / BOUND[dtype]).item()


@given(
    dtype=dtypes,
    rows=st.integers(1, 3),
    tokens=st.integers(1, 5),
    width=st.integers(1, 4),
    piece=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_the_difference_is_that_of_whole_tensors_however_small_the_pieces(
    dtype: torch.dtype, rows: int, tokens: int, width: int, piece: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, tokens + 3, width, generator=random).to(dtype)
    rounded = (numbers.double() * (1 + torch.finfo(dtype).eps * (seed % 4))).to(dtype)
    saved, again = bytes_of(numbers, tokens, first=2), bytes_of(rounded, tokens, first=2).contiguous().flatten()
    expected = by_formula(saved, again, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_PIECE", piece)
        assert math.isclose(difference(saved, again, dtype), expected, rel_tol=1e-12)


@given(where=st.integers(0, 2 * 5 * 3 - 1), piece=st.integers(1, 9), dtype=dtypes)
@settings(max_examples=60, deadline=None)
def test_one_wrong_number_is_found_wherever_it_is(where: int, piece: int, dtype: torch.dtype) -> None:
    saved = torch.ones(2, 15, dtype=dtype)
    again = saved.clone()
    again.view(-1)[where] = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_PIECE", piece)
        assert not have_same_bits(again.view(torch.uint8), saved.view(torch.uint8))
        assert have_same_bits(saved.view(torch.uint8), saved.clone().view(torch.uint8))
        assert math.isclose(relative_difference(again, saved), math.sqrt(1 / 30), rel_tol=1e-12)


@pytest.mark.parametrize("dtype", BOUND)
def test_what_is_not_finite_is_equal_where_its_bits_are_and_hides_no_difference(dtype: torch.dtype) -> None:
    saved = torch.ones(1, 8, dtype=dtype)
    saved[0, 0], saved[0, 1] = math.nan, math.inf
    again = saved.clone()
    again[0, 7] = 2
    assert relative_difference(saved.clone(), saved) == 0
    assert math.isclose(relative_difference(again, saved), math.sqrt(1 / 6), rel_tol=1e-12)
    for value in (math.nan, math.inf, 1.0):
        for at in (0, 1, 2):
            wrong = saved.clone()
            wrong[0, at] = value
            if not torch.equal(wrong.view(torch.uint8), saved.view(torch.uint8)):
                assert not relative_difference(wrong, saved) <= 1


def test_a_scale_of_zero_lets_no_difference_pass() -> None:
    zero = torch.zeros(1, 4)
    assert not difference(bytes_of(zero[None], 1), bytes_of(zero[None] + 1e-30, 1).flatten(), torch.float32) <= 1.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64])
def test_what_has_no_bound_must_be_the_same(dtype: torch.dtype) -> None:
    saved = torch.ones(2, 3, 4).to(dtype)
    other = saved.clone()
    other[1, 2, 3] = 0
    assert difference(bytes_of(saved, 3), bytes_of(saved.clone(), 3).flatten(), dtype) == 0
    assert difference(bytes_of(saved, 3), bytes_of(other, 3).flatten(), dtype) == math.inf


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 16, 23, 24])
@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (8, 16), (0, 8), (3, 3), (0, 5), (1, 8)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_every_byte_counts_at_any_number_of_bytes_and_any_offset(
    piece: int, rows: int, ours: int, theirs: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In words of eight bytes where both begin at one; what is left over, and all else, byte by byte."""
    monkeypatch.setattr(comparison, "_PIECE", piece)

    def block(offset: int, numbers: torch.Tensor) -> torch.Tensor:
        wide = torch.full((rows, nbytes + 40), 99, dtype=torch.uint8)
        wide[:, offset : offset + nbytes] = numbers
        return wide[:, offset : offset + nbytes]

    numbers = torch.arange(rows * nbytes, dtype=torch.uint8).view(rows, nbytes)
    assert have_same_bits(block(ours, numbers), block(theirs, numbers))
    for row in range(rows):
        for at in range(nbytes):
            other = numbers.clone()
            other[row, at] ^= 1
            assert not have_same_bits(block(ours, numbers), block(theirs, other))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_is_the_same_as_nothing(shape: tuple[int, int, int]) -> None:
    nothing = torch.empty(shape, dtype=torch.uint8)
    assert have_same_bits(nothing.flatten(1), nothing.flatten(1))


MEASURES = """
import sys, torch
from memo.swap.recompute.comparison import have_same_bits, relative_difference
nbytes, rows, differs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
numbers = torch.ones(nbytes // 2, dtype=torch.bfloat16)
block = numbers.view(torch.uint8).view(rows, -1, 2048)
saved = block[:, block.shape[1] // 2:]
again = saved.clone(memory_format=torch.contiguous_format)
if differs:
    again.view(torch.bfloat16)[0, 0, 0] += 0.01
def compare(saved, again):
    if not have_same_bits(again.flatten(1), saved.flatten(1)):
        relative_difference(again.flatten(1).view(torch.bfloat16), saved.flatten(1).view(torch.bfloat16))
one = torch.ones(1, 64, 2, dtype=torch.bfloat16).view(torch.uint8)
compare(one, (one.view(torch.bfloat16) * 2.0).view(torch.uint8))
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10
open("/proc/self/clear_refs", "w").write("5")
before = peak()
compare(saved, again)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of resident memory is set back by Linux alone")
@pytest.mark.parametrize(
    ("nbytes", "rows", "differs"), [(128 * MIB, 1, True), (128 * MIB, 64, True), (512 * MIB, 4, False)]
)
def test_comparing_takes_room_that_does_not_grow_with_the_tensor(nbytes: int, rows: int, differs: bool) -> None:
    """Half of the tokens are compared: 64 and 256 MiB. At 64 that is at most 1.5 times the recomputed tensor, itself
    included."""
    took = subprocess.run(
        [sys.executable, "-c", MEASURES, str(nbytes), str(rows), str(differs)],
        check=True, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert int(took.stdout) <= 32 * MIB


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("nbytes", [96 << 10, 48 * MIB])
def test_what_comparing_takes_is_what_plans_count_for_it(nbytes: int, rows: int, differs: bool) -> None:
    saved = torch.ones(rows, nbytes // rows // 2, dtype=torch.bfloat16)
    again = saved.clone()
    if differs:
        again[0, 0] += 0.01
    with LiveBytes() as device:
        difference(saved.view(torch.uint8)[:, None], again.view(torch.uint8).flatten(), torch.bfloat16)
    assert device.peak <= comparing_nbytes(nbytes) + 100  # and a few numbers
    if differs:
        assert device.peak >= 0.7 * comparing_nbytes(nbytes)
