"""A block by arithmetic: what it says is saved and held is what a recorded step saves and holds, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_layers import (
    HEADS,
    HIDDEN,
    LAYERS,
    ONE_RANK,
    TOKENS,
    assert_points_are_bounded,
    costs_of,
    recorded,
    second_statistics,
    shape,
)
from torch.distributed.pipelining._backward import stage_backward_input

from memo.gpt import GPTConfig, Precision
from memo.gpt.arithmetic.block_bytes import ALIGNED, BlockBytes, BlockFigures, ElementSizes
from memo.gpt.model import GPT, tiled_mlp
from memo.parallel import Layout

LAYOUTS = [ONE_RANK, Layout(tp=4), Layout(cp=2), Layout(tp=2, cp=2)]
SHARED = [Layout(cp=8), Layout(tp=2, cp=4)]  # context-parallel ranks share the 4 key/value heads, two and two
SHAPES: list[dict[str, Any]] = [
    {"positions": "rotary"},
    {"positions": "rotary", "kv_heads": 4, "bias": False},
    {"positions": "learned"},
    {"positions": "learned", "kv_heads": 4},
    {"positions": "rotary", "mlp_tiles": 8},
    {"variant": "llama", "kv_heads": 4},
    {"variant": "llama", "mlp_tiles": 8, "kv_heads": 4},
]


def block_of(config: GPTConfig, precision: Precision, layout: Layout, batch: int = 1) -> BlockBytes:
    return BlockFigures(config, TOKENS, ElementSizes.of(precision), batch=batch, tp=layout.tp, cp=layout.cp).block()


def cases() -> list[Any]:
    """Everything in the two precisions with two bytes; float32, which is bfloat16 twice, in one shape."""
    return [
        pytest.param(shape(**sizes), layout, precision, id=f"{named(sizes)}-tp{layout.tp}cp{layout.cp}-{precision}")
        for sizes in SHAPES
        for layout in layouts_of(sizes)
        for precision in Precision
        if precision is not Precision.FP32 or sizes is SHAPES[0]
    ]


def layouts_of(sizes: dict[str, Any]) -> list[Layout]:
    return LAYOUTS + SHARED if "kv_heads" in sizes else LAYOUTS


def named(sizes: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in sizes.items())


@pytest.mark.covering(1, apart=True)
@pytest.mark.parametrize(("config", "layout", "precision"), cases())
def test_saved_bytes_are_those_of_a_recorded_step(config: GPTConfig, layout: Layout, precision: Precision) -> None:
    block = block_of(config, precision, layout)
    rank_tokens = TOKENS / (layout.tp * layout.cp)
    saved = (block.always + block.all + second_statistics(config, precision)) * rank_tokens
    assert saved == recorded(config, precision, layout).saved


@pytest.mark.covering(1, apart=True)
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        pytest.param(sizes, layout, id=f"{named(sizes)}-tp{layout.tp}cp{layout.cp}")
        for sizes in SHAPES
        for layout in layouts_of(sizes)
    ],
)
def test_points_save_and_hold_at_most_what_they_say(sizes: dict[str, Any], layout: Layout) -> None:
    for precision in (Precision.BF16, Precision.BF16_AUTOCAST):
        config = shape(**sizes)
        assert_points_are_bounded(block_of(config, precision, layout), costs_of(config, precision, layout))


@pytest.mark.parametrize("sizes", [{"positions": "rotary"}, {"variant": "llama"}], ids=["gpt", "llama"])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_AUTOCAST])
def test_so_they_do_on_eight_ranks(sizes: dict[str, Any], precision: Precision) -> None:
    config, layout = shape(**sizes, kv_heads=HEADS), Layout(tp=8)
    assert_points_are_bounded(block_of(config, precision, layout), costs_of(config, precision, layout))


@pytest.mark.covering(1, apart=True)
@pytest.mark.parametrize(("config", "layout", "precision"), cases())
def test_the_device_holds_what_is_saved_and_the_transients(
    config: GPTConfig, layout: Layout, precision: Precision
) -> None:
    """An upper bound, and a tight one but for the CPU's norms, exchanged heads, and tiles of a few columns."""
    within(config, layout, precision, batch=1)


@pytest.mark.parametrize("layout", [ONE_RANK, Layout(tp=2)], ids=["tp1", "tp2"])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_AUTOCAST])
def test_so_it_does_with_several_sequences(layout: Layout, precision: Precision) -> None:
    within(shape(positions="rotary"), layout, precision, batch=2)


def within(config: GPTConfig, layout: Layout, precision: Precision, *, batch: int) -> None:
    found, block = recorded(config, precision, layout, batch), block_of(config, precision, layout, batch)
    rank_tokens = batch * TOKENS / (layout.tp * layout.cp)
    saved = (block.always + block.all + second_statistics(config, precision)) * rank_tokens
    forward, backward = saved + block.forward_transient * rank_tokens, saved + block.backward_transient * rank_tokens
    its_input = config.hidden * ElementSizes.of(precision).stream * rank_tokens
    assert found.forward + its_input <= forward
    # Gradients of weights come on top, which do not grow with the tokens: two of the MLP's matrices at a time.
    weights = 2 * 4 * config.hidden * config.ffn / layout.tp
    assert found.backward + its_input <= backward + weights
    if layout.cp == 1 and config.norm == "layernorm" and (layout.tp == 1 or config.mlp_tiles == 1):
        assert found.forward + its_input >= 0.9 * forward
        assert found.backward + its_input >= 0.9 * backward


def test_tiles_are_cut_as_the_mlp_cuts_them() -> None:
    assert ALIGNED == tiled_mlp.ALIGNED


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_AUTOCAST])
@pytest.mark.parametrize("others", [{}, {"variant": "llama", "kv_heads": 4}, {"mlp_tiles": 8}], ids=str)
def test_the_first_half_of_a_split_backward_leaves_as_many_gradients(
    others: dict[str, Any], precision: Precision
) -> None:
    """Backward split into inputs and weights as by torch's pipelining."""
    config, batch, tokens = shape(**others), 2, 64
    layers = GPT(config).layers
    entry = torch.randn(batch, tokens, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.BF16_AUTOCAST):
        hidden = entry
        for layer in layers:
            hidden = layer(hidden)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    _, groups = stage_backward_input([hidden], [torch.randn_like(hidden)], [entry], iter(parameters))
    waiting = {
        gradient.untyped_storage()
        for group in groups
        for gradients in group.get("grads") or ()
        for gradient in gradients or ()
        if isinstance(gradient, torch.Tensor)
    }
    block = BlockFigures(config, tokens, ElementSizes.of(precision), batch=batch).block()
    assert sum(storage.nbytes() for storage in waiting) == LAYERS * block.between * batch * tokens
