"""Rotary positions: lengths stay, scores depend on distance only, a million tokens keep their precision."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from memo.errors import UsageError
from memo.gpt.model import rotary
from memo.gpt.model.rotary import rotary_tables, rotate
from memo.gpt.rope_scaling import RopeScaling, RopeScalingKind

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


def angles(scaling: RopeScaling | None, *, head_dim: int = 64, theta: float = 1e4) -> tuple[torch.Tensor, float]:
    """Radians from one position to the next of each pair, and the length of a rotated unit vector."""
    cos, sin = rotary_tables(2, head_dim, theta, device=CPU, dtype=torch.float64, scaling=scaling)
    length = float((cos[1] ** 2 + sin[1] ** 2).sqrt().max())
    return torch.atan2(sin[1], cos[1]).flatten(), length


@pytest.mark.parametrize("original", [512, 4096])
@pytest.mark.parametrize("factor", [2.0, 8.0])
@pytest.mark.parametrize("kind", [RopeScalingKind.LINEAR, RopeScalingKind.YARN])
def test_scaled_frequencies_are_those_of_transformers(kind: RopeScalingKind, factor: float, original: int) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=round(original * factor),
        rope_parameters={
            "rope_type": str(kind),
            "factor": factor,
            "rope_theta": 1e4,
            "original_max_position_embeddings": original,
        },
    )
    expected, length = ROPE_INIT_FUNCTIONS[str(kind)](config, CPU)
    found, own = angles(RopeScaling(kind=kind, factor=factor, original_seq=original))
    assert torch.allclose(found, expected.double(), rtol=1e-5)
    assert own == pytest.approx(length)


def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest() -> None:
    plain, _ = angles(None)
    scaled, length = angles(RopeScaling(kind=RopeScalingKind.NTK, factor=8.0, original_seq=512))
    assert length == pytest.approx(1.0)
    assert scaled[0] == plain[0]
    assert float(plain[-1] / scaled[-1]) == pytest.approx(8.0)
    assert bool((scaled <= plain).all())


def test_a_factor_of_one_changes_nothing() -> None:
    plain = rotary_tables(100, 64, 1e4, device=CPU, dtype=torch.float32)
    for kind in RopeScalingKind:
        one = RopeScaling(kind=kind, factor=1.0, original_seq=100)
        same = rotary_tables(100, 64, 1e4, device=CPU, dtype=torch.float32, scaling=one)
        assert all(map(torch.equal, plain, same))


@pytest.mark.parametrize("text", ["yarn", "yarn:", "yarn:0.5", "yarn:nan", "yarn:inf", "linear:2000", "other:2", "8"])
def test_what_is_no_scaling_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="rope scaling"):
        RopeScaling.parse(text, seq=1024)


def test_the_factor_says_the_original_length() -> None:
    assert RopeScaling.parse("none", seq=1024) is None
    found = RopeScaling.parse("yarn:8", seq=32768)
    assert found == RopeScaling(kind=RopeScalingKind.YARN, factor=8.0, original_seq=4096)
    assert str(found) == "yarn:8 of 4k tokens"
