"""A layer with experts by arithmetic: what it says is saved and held is what a recorded step saves and holds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorded_layers import TOKENS, assert_points_are_bounded, costs_of, recorded, second_statistics, shape

from memo.gpt import GPTConfig, MoeConfig, Precision
from memo.gpt.arithmetic.block_bytes import BlockBytes, ElementSizes
from memo.gpt.arithmetic.mixture_bytes import SKEW, MixtureFigures
from memo.gpt.model import Experts
from memo.parallel import Layout

MIXTURES: list[dict[str, int]] = [
    {},
    {"shared_experts": 1},
    {"bottleneck": 32},
    {"bottleneck": 32, "shared_experts": 2},
    {"top_k": 1},
    {"top_k": 3, "experts": 5, "expert_hidden": 96},
]
LAYOUTS = [Layout(), Layout(tp=2), Layout(cp=2), Layout(dp=2, ep=2), Layout(dp=2, tp=2, ep=2)]
CONSTANT = 10 * 8 * 8
"""Bytes that do not grow with the tokens, at most: counts of the experts' rows."""


def mixed(moe: dict[str, int], **others: Any) -> GPTConfig:
    return shape(moe=MoeConfig(**{"experts": 8, "top_k": 2, "expert_hidden": 64} | moe), **others)


def block_of(config: GPTConfig, precision: Precision, layout: Layout, *, skew: float = 1.0) -> BlockBytes:
    sizes = ElementSizes.of(precision)
    return MixtureFigures(config, TOKENS, sizes, tp=layout.tp, cp=layout.cp, ep=layout.ep, skew=skew).block()


@pytest.fixture(autouse=True)
def _chosen_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a recorded step are, whose ranks are simulated."""
    counted = Experts.exchanged_counts

    def equal(rows: torch.Tensor, count: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        counted(rows, count, group)
        counts = torch.full((count,), len(rows) // count)
        return counts, counts.clone()

    monkeypatch.setattr(Experts, "exchanged_counts", staticmethod(equal))


def cases() -> list[Any]:
    found = []
    for layout in LAYOUTS:
        for precision in Precision:
            for variant in ("gpt", "llama"):
                for moe in MIXTURES if layout == Layout() else MIXTURES[1:4]:
                    given = {"positions": "rotary"} if variant == "gpt" else {"variant": "llama", "kv_heads": 8}
                    name = f"{variant}-tp{layout.tp}cp{layout.cp}ep{layout.ep}-{precision}-{moe}"
                    if precision is not Precision.FP32 or layout == Layout():
                        found.append(pytest.param(mixed(moe, **given), layout, precision, id=name))
    shared = mixed(MIXTURES[1], variant="llama", kv_heads=2)
    return [*found, pytest.param(shared, Layout(cp=4), Precision.BF16, id="llama-cp4, which share key/value heads")]


@pytest.mark.covering(1, apart=True)
@pytest.mark.parametrize(("config", "layout", "precision"), cases())
def test_saved_and_held_bytes_are_those_of_a_recorded_step(
    config: GPTConfig, layout: Layout, precision: Precision
) -> None:
    block, found = block_of(config, precision, layout), recorded(config, precision, layout)
    rank_tokens = TOKENS / (layout.tp * layout.cp)
    norms = second_statistics(config, precision)
    saved = block.always + block.all + norms
    assert 0 <= found.saved / rank_tokens - saved < CONSTANT / rank_tokens
    its_input = config.hidden * ElementSizes.of(precision).stream
    # Neither do the router's float32 weights, and the gradients of two matrices of all experts.
    assert config.moe is not None
    router = CONSTANT + 4 * config.expert_count * config.hidden
    matrices = 2 * 4 * config.hidden * (config.ffn + config.expert_count * config.moe.expert_hidden)
    assert found.forward / rank_tokens + its_input <= saved + block.forward_transient + router / rank_tokens
    assert found.backward / rank_tokens + its_input <= saved + block.backward_transient + matrices / rank_tokens
    if layout.cp == 1 and config.norm == "layernorm":
        assert found.forward / rank_tokens + its_input >= 0.85 * (saved + block.forward_transient)
        assert found.backward / rank_tokens + its_input >= 0.85 * (saved + block.backward_transient)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"tp{layout.tp}cp{layout.cp}ep{layout.ep}")
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_AUTOCAST])
@pytest.mark.parametrize("moe", MIXTURES[1:4], ids=str)
def test_points_save_and_hold_at_most_what_they_say(moe: dict[str, int], precision: Precision, layout: Layout) -> None:
    config = mixed(moe, positions="rotary")
    block, cost = block_of(config, precision, layout), costs_of(config, precision, layout)
    assert_points_are_bounded(block, cost)


def test_experts_on_other_ranks_have_room_for_more_rows_than_the_mean() -> None:
    config, layout = mixed({}), Layout(dp=2, ep=2)
    balanced, skewed = (block_of(config, Precision.BF16, layout, skew=skew) for skew in (1.0, SKEW))
    rows, inner, numbers = 2 * 128 * 2, 2 * 64 * 2, 2 * 2 * 8
    assert skewed.all - balanced.all == (SKEW - 1) * (rows + 2 * inner + numbers)
    alone = functools.partial(block_of, config, Precision.BF16, Layout())
    assert alone(skew=SKEW) == alone(skew=1.0)
