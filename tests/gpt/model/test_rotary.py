"""Rotary positions: lengths stay, scores depend on distance only, a million tokens keep their precision."""

from __future__ import annotations

import math

import pytest
import torch

from memo.errors import UsageError
from memo.gpt.model import rotary
from memo.gpt.model.rotary import rotary_tables, rotate
from memo.gpt.rope_scaling import RopeScaling

CPU = torch.device("cpu")


def test_rotation_keeps_lengths_and_leaves_position_zero() -> None:
    x = torch.randn(2, 33, 3, 16, dtype=torch.float64)
    turned = rotate(x, rotary_tables(33, 16, 1e4, device=CPU, dtype=torch.float64))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-13)
    assert torch.equal(turned[:, 0], x[:, 0])


def test_scores_depend_on_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64).unbind(0)
    tables = rotary_tables(64, 32, 1e4, device=CPU, dtype=torch.float64)
    queries, keys = (
        rotate(query.expand(1, 64, 1, 32), tables)[0, :, 0],
        rotate(key.expand(1, 64, 1, 32), tables)[0, :, 0],
    )
    scores = queries @ keys.T
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert (scores.diagonal(-1)[0] - scores.diagonal(-17)[0]).abs() > 1e-3


def test_rotation_is_the_complex_product() -> None:
    x = torch.randn(1, 5, 1, 8, dtype=torch.float64)
    turned = rotate(x, rotary_tables(5, 8, 1e4, device=CPU, dtype=torch.float64))
    frequency = 1e4 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = torch.arange(5, dtype=torch.float64)[:, None] * frequency
    product = torch.complex(x[0, :, 0, :4], x[0, :, 0, 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned[0, :, 0], torch.cat((product.real, product.imag), -1), rtol=0, atol=1e-14)


def test_rotation_keeps_the_dtype_and_computes_in_float32() -> None:
    x = torch.randn(1, 40, 2, 16, dtype=torch.bfloat16)
    tables = rotary_tables(40, 16, 1e4, device=CPU, dtype=torch.bfloat16)
    assert tables[0].dtype is torch.float32
    turned = rotate(x, tables)
    assert turned.dtype is torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), tables).bfloat16())


def test_angles_are_exact_at_a_million_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    last = (1 << 20) - 1
    cos, sin = rotary_tables(last + 1, 4, 1e4, device=CPU, dtype=torch.float32)
    for column, frequency in enumerate((1.0, 1e-2)):
        # One rounding to float32 is all the error there may be.
        assert abs(cos[last, 0, column].item() - math.cos(last * frequency)) < 2**-24
        assert abs(sin[last, 0, column].item() - math.sin(last * frequency)) < 2**-24


def test_tables_do_not_depend_on_how_they_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rotary_tables(100, 8, 1e4, device=CPU, dtype=torch.float32)
    monkeypatch.setattr(rotary, "TABLE_CHUNK", 7)
    for one, other in zip(whole, rotary_tables(100, 8, 1e4, device=CPU, dtype=torch.float32), strict=True):
        assert torch.equal(one, other)


def test_gradient_of_rotation() -> None:
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    tables = rotary_tables(4, 6, 1e4, device=CPU, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda value: rotate(value, tables), (x,))


def scaled(kind: str, factor: float, *, head: int = 64, original: int = 4096) -> list[float]:
    return RopeScaling(kind=kind, factor=factor, original=original).frequencies(head, 1e4)  # type: ignore[arg-type]


def plain(head: int = 64) -> list[float]:
    return [1e4 ** (-2 * i / head) for i in range(head // 2)]


def test_linear_scaling_is_a_division_of_positions() -> None:
    scaling = RopeScaling(kind="linear", factor=8.0, original=16)
    far = rotary_tables(16 * 8, 8, 1e4, device=CPU, dtype=torch.float64, scaling=scaling)
    near = rotary_tables(16, 8, 1e4, device=CPU, dtype=torch.float64)
    for one, other in zip(far, near, strict=True):
        torch.testing.assert_close(one[::8], other, rtol=0, atol=1e-14)


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_the_factor() -> None:
    found = scaled("ntk", 8.0)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(plain()[-1] / 8, rel=1e-12)  # b^(-(d-2)/d) with b s^(d/(d-2))
    assert all(slow / 8 <= own <= slow for own, slow in zip(found, plain(), strict=True))


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_scales_scores() -> None:
    found, own = scaled("yarn", 8.0), plain()
    rotations = [4096 * frequency / (2 * math.pi) for frequency in own]
    for pair, frequency, turns in zip(found, own, rotations, strict=True):
        if turns > 32:
            assert pair == frequency
        elif turns < 1:
            assert pair == frequency / 8
        else:
            share = (turns - 1) / 31
            assert pair == pytest.approx((1 - share) * frequency / 8 + share * frequency, rel=1e-12)
    assert min(rotations) < 1 < 32 < max(rotations)
    scaling = RopeScaling(kind="yarn", factor=8.0, original=4096)
    cos, sin = rotary_tables(9, 64, 1e4, device=CPU, dtype=torch.float64, scaling=scaling)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, (0.1 * math.log(8) + 1) ** 2), rtol=1e-13, atol=0)


def test_a_factor_of_one_changes_no_bit() -> None:
    for kind in ("linear", "ntk", "yarn"):
        scaling = RopeScaling(kind=kind, factor=1.0, original=64)  # type: ignore[arg-type]
        assert scaling.frequencies(64, 1e4) == pytest.approx(plain(), rel=1e-15)
        assert scaling.magnitude == 1.0


@pytest.mark.parametrize(
    "text", ["yarn", "yarn:", "yarn:x", "yarn:0.5", "yarn:nan", "abf:8", "yarn:8:0", "yarn:8:many"]
)
def test_a_scaling_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rope-scaling"):
        RopeScaling.parse(text, 32768)


def test_the_original_context_is_the_length_divided_by_the_factor() -> None:
    assert RopeScaling.parse("yarn:8", 32768) == RopeScaling(kind="yarn", factor=8.0, original=4096)
    assert RopeScaling.parse("yarn:8:2k", 32768).original == 2048
    assert str(RopeScaling.parse("yarn:8", 32768)) == "yarn:8:4k"
