"""Layers with local attention by arithmetic: bytes of a recorded step, and FLOPs of the pairs that are attended."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from recorded_layers import TOKENS, costs_of, recorded, second_statistics, shape

from memo.errors import UsageError
from memo.gpt import AttentionPattern, GPTConfig, MoeConfig, Precision, preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.gpt.arithmetic.block_bytes import BlockBytes, BlockFigures, ElementSizes
from memo.gpt.arithmetic.flops import flops_per_token
from memo.mip.inputs import hardware_preset
from memo.parallel import Layout

WINDOW = 160
LAYOUTS = [Layout(), Layout(tp=2), Layout(cp=2), Layout(cp=2, tp=2)]
H100 = hardware_preset("h100")


def local(**others: Any) -> GPTConfig:
    """All layers, as a recorded one is the middle of three that are alike."""
    return shape(pattern=AttentionPattern(window=WINDOW, full_every=0), **others)


def block_of(config: GPTConfig, precision: Precision, layout: Layout) -> BlockBytes:
    return BlockFigures(config, TOKENS, ElementSizes.of(precision), tp=layout.tp, cp=layout.cp, window=WINDOW).block()


CASES = [
    pytest.param(given, layout, precision, id=f"{variant}-tp{layout.tp}cp{layout.cp}-{precision}")
    for layout in LAYOUTS
    for precision in Precision
    for variant, given in (("gpt", {}), ("llama", {"variant": "llama", "kv_heads": 4}))
    if precision is not Precision.BF16 or layout == Layout() or variant == "llama"
]


@pytest.mark.covering(1, apart=True)
@pytest.mark.parametrize(("given", "layout", "precision"), CASES)
def test_saved_and_held_bytes_are_those_of_a_recorded_step(
    given: dict[str, Any], layout: Layout, precision: Precision
) -> None:
    config = local(**given)
    block, found = block_of(config, precision, layout), recorded(config, precision, layout)
    rank_tokens = TOKENS / (layout.tp * layout.cp)
    saved = block.always + block.all + second_statistics(config, precision)
    assert found.saved == saved * rank_tokens
    its_input = config.hidden * ElementSizes.of(precision).stream
    matrices = 2 * 4 * config.hidden * config.ffn  # gradients of two of them
    assert found.forward / rank_tokens + its_input <= saved + block.forward_transient
    assert found.backward / rank_tokens + its_input <= saved + block.backward_transient + matrices / rank_tokens
    if layout.cp == 1 and config.norm == "layernorm":
        assert found.forward / rank_tokens + its_input >= 0.85 * (saved + block.forward_transient)
        assert found.backward / rank_tokens + its_input >= 0.85 * (saved + block.backward_transient)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=["tp1", "tp2"])
@pytest.mark.parametrize("precision", Precision)
def test_levels_keep_what_they_do_of_a_layer_with_full_attention(precision: Precision, layout: Layout) -> None:
    config = local(positions="rotary")
    near, far = (costs_of(one, precision, layout) for one in (config, dataclasses.replace(config, pattern=None)))
    saved = [[(point.name, point.saved_bytes, point.held_bytes) for point in each.points] for each in (near, far)]
    assert saved[0] == saved[1]


def _pairs(tokens: int, window: int) -> int:
    """Pairs of a token and one that it attends to, counted."""
    ahead = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return int(((ahead >= 0) & (ahead < window)).sum())


def test_flops_are_those_of_the_pairs_in_the_windows() -> None:
    tokens, window = 512, 96
    config = preset("tiny", layers=6, max_seq=tokens, pattern=AttentionPattern(window=window, full_every=3))
    full = dataclasses.replace(config, pattern=None)
    saved = (flops_per_token(full, tokens) - flops_per_token(config, tokens)) * tokens
    # Of the four local layers. The corner of the scores is a triangle, of which the s x s causal one has s / 2 pairs more.
    counted = [_pairs(tokens, seen) - seen / 2 for seen in (tokens, window)]
    assert saved == 4 * 12 * config.hidden * (counted[0] - counted[1])
    whole = flops_per_token(full, tokens, causal=False) - flops_per_token(config, tokens, causal=False)
    assert whole == 4 * 12 * config.hidden * (tokens - window)
    assert flops_per_token(config, window) == flops_per_token(full, window)  # the window is the sequence


def test_each_kind_of_layer_is_a_class_with_its_own_time() -> None:
    moe = MoeConfig(experts=4, expert_hidden=256, every=3)
    config = preset("125m", positions="rotary", moe=moe, pattern=AttentionPattern(window=1024, full_every=2))
    profile = derive_profile(config, H100, StepLayout(tokens=1 << 15))
    assert profile.layers == ("local", "block", "local experts", "block", "local", "experts") * 2
    classes = {one.name: one for one in profile.classes}
    for near, far in (("local", "block"), ("local experts", "experts")):
        one, other = classes[near], classes[far]
        assert one.forward_flops - one.attention_flops == other.forward_flops - other.attention_flops
        assert one.attention_flops == other.attention_flops * (2 * 1024 - 1024**2 / 2**15) / 2**15
        assert one.forward_s < other.forward_s
        assert one.backward_s < other.backward_s
        assert [point.saved_bytes for point in one.points] == [point.saved_bytes for point in other.points]
        assert one.attention_s == 0 < other.attention_s  # it does not grow with the square of the length


def test_a_short_window_takes_no_less_than_its_tiles_and_its_traffic() -> None:
    def seconds(window: int | None) -> float:
        pattern = None if window is None else AttentionPattern(window=window, full_every=0)
        config = preset("7b", layers=1, pattern=pattern)
        (layer,) = derive_profile(config, H100, StepLayout(tokens=1 << 15)).classes
        return layer.forward_s

    times = [seconds(window) for window in (1, 16, 128, 1024, 8192, None)]
    assert times == sorted(times)
    assert seconds(1 << 15) == seconds(None)
    config, tokens = preset("7b", layers=1), 1 << 15
    tile = H100.attention_s(4 * config.hidden * 128 * tokens, head=config.head_dim, keys=1)
    traffic = 2 * (config.qkv_width + config.hidden) * tokens / H100.elementwise_bytes_per_s
    without = derive_profile(config, H100, StepLayout(tokens=tokens)).classes[0]
    keys = 8192 - 8192**2 / (2 * tokens) + 128
    wide = without.forward_s - without.attention_s * (1 - keys / (tokens / 2))
    assert seconds(8192) == pytest.approx(wide, rel=1e-12)
    assert times[0] - (without.forward_s - without.attention_s) == pytest.approx(max(tile, traffic), rel=0.01)


def test_a_ring_is_refused_in_one_line() -> None:
    config = preset("tiny", positions="rotary", pattern=AttentionPattern(window=64))
    layout = StepLayout(tokens=4096, cp=2, gpus=2, ring=True)
    with pytest.raises(UsageError, match="not possible with ring attention") as raised:
        derive_profile(config, H100, layout)
    assert "\n" not in str(raised.value)
    # A window of the sequence is full attention.
    derive_profile(dataclasses.replace(config, pattern=AttentionPattern(window=4096)), H100, layout)
