"""A block by arithmetic: what it says is saved and held is what a recorded step saves and holds, to the byte."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input

from memo.allocator.byteless_tensors import BytelessMode
from memo.allocator.trace import Allocation, AllocationTrace
from memo.gpt.arithmetic.block_bytes import ALIGNED, Block, ElementSizes
from memo.gpt.config import GPTConfig, preset
from memo.gpt.model import tiled_mlp
from memo.gpt.model.model import GPT
from memo.gpt.train_config import Precision
from memo.parallel.layout import Layout
from memo.parallel.solo_rank import simulated_rank
from memo.record.offload_without_bytes import OffloadWithoutBytes
from memo.record.record_rank import rank_step
from memo.record.recording import Recording, Role, record_step
from memo.record.step import gpt_step
from memo.swap.layers import find_layers
from memo.swap.token_levels import LayerCosts, Level

TOKENS, HIDDEN, HEADS, LAYERS = 1152, 128, 8, 3
MIDDLE = "layers.1"

ONE_RANK = Layout()
LAYOUTS = [ONE_RANK, Layout(tp=4), Layout(cp=2), Layout(tp=2, cp=2)]
SHAPES: list[dict[str, Any]] = [
    {"positions": "rotary"},
    {"positions": "rotary", "kv_heads": 4, "bias": False},
    {"positions": "learned"},
    {"positions": "learned", "kv_heads": 4},
    {"positions": "rotary", "mlp_tiles": 8},
    {"variant": "llama", "kv_heads": 4},
    {"variant": "llama", "mlp_tiles": 8, "kv_heads": 4},
]


def shape(**others: Any) -> GPTConfig:
    sizes = {"vocab_size": 64, "max_seq": TOKENS, "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS}
    return preset("tiny", **(sizes | others))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Saved bytes and peak bytes of the middle layer, without its input and autocast's copies of weights."""

    saved: float
    forward: int
    backward: int


@functools.cache
def recorded(config: GPTConfig, precision: Precision, layout: Layout, batch: int = 1) -> Recorded:
    if layout == ONE_RANK:
        step = functools.partial(gpt_step, config, batch=batch, tokens=TOKENS, precision=precision)
        return measured(record_step(step, exact=True), precision)
    with simulated_rank(layout) as world:
        one = rank_step(config, world, batch=batch, tokens=TOKENS, precision=precision)
        return measured(record_step(one, exact=True), precision)


def measured(recording: Recording, precision: Precision) -> Recorded:
    trace = recording.trace
    own = [a for a in trace.allocations if a.phase == "forward" and in_middle(a) and not is_weight(a, precision)]
    end = max(a.lower for a in own) + 1
    back = [a for a in trace.allocations if a.group == f"{MIDDLE}.backward"]
    first, last = min(a.lower for a in back), max(a.upper for a in back)
    # What lives on until the step's end is a parameter's gradient.
    made = [a for a in trace.allocations if a.phase == "backward" and a.upper < trace.end]
    of_layers = [role for role in Role if role not in (Role.OUTSIDE, Role.WEIGHTS)]
    return Recorded(
        saved=sum(recording.saved_nbytes[role] for role in of_layers) / LAYERS,
        forward=peak(clipped(own, 0, end)),
        backward=peak(clipped([*own, *made], first, last)),
    )


def block_of(config: GPTConfig, precision: Precision, layout: Layout, batch: int = 1) -> Block:
    return Block.of(config, TOKENS, ElementSizes.of(precision), batch=batch, tp=layout.tp, cp=layout.cp)


def cases() -> list[Any]:
    """Everything in the two precisions with two bytes; float32, which is bfloat16 twice, in one shape."""
    return [
        pytest.param(shape(**sizes), layout, precision, id=f"{named(sizes)}-tp{layout.tp}cp{layout.cp}-{precision}")
        for sizes in SHAPES
        for layout in LAYOUTS
        for precision in Precision
        if precision is not Precision.FP32 or sizes is SHAPES[0]
    ]


def named(sizes: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in sizes.items())


@pytest.mark.parametrize(("config", "layout", "precision"), cases())
def test_saved_bytes_are_those_of_a_recorded_step(config: GPTConfig, layout: Layout, precision: Precision) -> None:
    block = block_of(config, precision, layout)
    rank_tokens = TOKENS / (layout.tp * layout.cp)
    saved = (block.always + block.all + written_out_norms(config, precision)) * rank_tokens
    assert saved == recorded(config, precision, layout).saved


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"tp{layout.tp}cp{layout.cp}")
@pytest.mark.parametrize("sizes", SHAPES, ids=named)
def test_the_middle_level_moves_at_most_what_it_says(sizes: dict[str, Any], layout: Layout) -> None:
    config, precision = shape(**sizes), Precision.BF16_AUTOCAST
    block = block_of(config, precision, layout)
    cost = costs_of(config, precision, layout)
    assert cost.bytes_per_token[Level.SAVE_MATMULS] <= block.matmuls
    assert cost.beside_per_token[Level.SAVE_MATMULS] <= block.beside + block.products_in_pieces
    assert cost.beside_per_token.get(Level.SAVE_ALL, 0.0) <= block.in_pieces
    assert cost.held_per_token.get(Level.SAVE_MATMULS, 0.0) <= block.held_at_matmuls * (1 + 1 / 64)
    held = cost.held_per_token.get(Level.SAVE_ATTENTION)  # None: not divided
    assert held is None or block.held_at_attention / 2 <= held <= block.held_at_attention * (1 + 1 / 64)


@pytest.mark.parametrize("sizes", [{"positions": "rotary"}, {"variant": "llama"}], ids=["gpt", "llama"])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_AUTOCAST])
def test_so_it_does_on_eight_ranks(sizes: dict[str, Any], precision: Precision) -> None:
    config, layout = shape(**sizes, kv_heads=HEADS), Layout(tp=8)
    block = block_of(config, precision, layout)
    cost = costs_of(config, precision, layout)
    assert cost.bytes_per_token[Level.SAVE_MATMULS] <= block.matmuls
    assert cost.beside_per_token[Level.SAVE_MATMULS] <= block.beside + block.products_in_pieces


def costs_of(config: GPTConfig, precision: Precision, layout: Layout) -> LayerCosts:
    """Costs of one layer, as counted by the offloaded step of a rank."""
    with contextlib.ExitStack() as stack:
        if layout == ONE_RANK:
            build = functools.partial(gpt_step, config, batch=1, tokens=TOKENS, precision=precision)
        else:
            world = stack.enter_context(simulated_rank(layout))
            build = rank_step(config, world, batch=1, tokens=TOKENS, precision=precision)
        stack.enter_context(BytelessMode())
        step = build()
        manager = OffloadWithoutBytes(step.model, find_layers(step.model, step.layers), alpha=0.5).manager
        with manager:
            step.loss()
        first, *others = manager.levels_profile()
    assert all(cost.bytes_per_token == first.bytes_per_token for cost in others)
    return first


def written_out_norms(config: GPTConfig, precision: Precision) -> int:
    """A CPU has no fused rmsnorm: of each it saves the result in float32 as well, and in bfloat16 the input in float32
    instead of the input."""
    if config.norm != "rmsnorm":
        return 0
    return 2 * HIDDEN * (4 + (4 - 2 if precision is Precision.BF16 else 0))


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
    # Written out, an rmsnorm holds two more results in float32 than it saves.
    norms = written_out_norms(config, precision) + (2 * 4 * HIDDEN if config.norm == "rmsnorm" else 0)
    saved = (block.always + block.all + norms) * rank_tokens
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


def in_middle(allocation: Allocation) -> bool:
    return f"{allocation.tag.split(' ')[0]}.".startswith(f"{MIDDLE}.")


def is_weight(allocation: Allocation, precision: Precision) -> bool:
    """Autocast's copy of one: its size is no multiple of the tokens."""
    return (
        precision is Precision.BF16_AUTOCAST and allocation.size % (TOKENS // 4) != 0 and "_to_copy" in allocation.tag
    )


def clipped(allocations: Iterable[Allocation], first: int, last: int) -> list[Allocation]:
    return [
        dataclasses.replace(a, lower=max(a.lower, first), upper=min(a.upper, last))
        for a in allocations
        if a.lower < last and a.upper > first
    ]


def peak(allocations: Iterable[Allocation]) -> int:
    return AllocationTrace(allocations=tuple(allocations)).peak_nbytes


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
    block = Block.of(config, tokens, ElementSizes.of(precision), batch=batch)
    assert sum(storage.nbytes() for storage in waiting) == LAYERS * block.between * batch * tokens
