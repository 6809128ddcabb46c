"""A tensor- and sequence-parallel rank saves 16 / tp units of b·s·h a layer, and gathers an input once for all its readers.

The fake process group stands for the other ranks, so this needs no second process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

from memo.gpt import GPTConfig, preset
from memo.gpt.model.build_rank import build_stages
from memo.gpt.model.rotary import rotary_tables
from memo.parallel import ContextAttention, Layout, World, collectives, gathered_input
from memo.swap import cast_of_parameter

SEQ, HIDDEN, HEADS, BATCH = 256, 128, 16, 2
UNIT = BATCH * SEQ * HIDDEN * 4


@pytest.fixture(autouse=True)
def _eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def layer_of(shape: GPTConfig, **sizes: Any) -> nn.Module:
    world = World.of(Layout(**sizes), "cpu")
    (stage,) = build_stages(shape, world, seq=SEQ, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    return next(iter(stage.layers.values()))


def gpt() -> GPTConfig:
    return preset("tiny", vocab_size=61, max_seq=SEQ, layers=2, hidden=HIDDEN, heads=HEADS)


def saved_units(layer: nn.Module, tokens: int, *extra: Any) -> tuple[float, torch.Tensor]:
    """Of what one layer saves, parameters aside, in units of b·s·h; and the layer's output."""
    storages: dict[torch.UntypedStorage, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        of_parameter = any(isinstance(seen, nn.Parameter) for seen in (tensor, tensor._base)) or cast_of_parameter(
            tensor
        )
        if not of_parameter and all(storage is not t.untyped_storage() for pair in extra for t in pair):
            storages[storage] = storage.nbytes()
        return tensor

    x = torch.randn(BATCH, tokens, HIDDEN, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x * 1, *extra)
    return sum(storages.values()) / UNIT, out


# Norm statistics and attention's logarithms: two floats a token and norm, one a token and head.
SMALL = (4 + HEADS) / HIDDEN


def test_a_gpt_layer_saves_a_share_of_sixteen_units() -> None:
    alone, _ = saved_units(layer_of(gpt(), dp=8), SEQ)
    assert alone == pytest.approx(16 + SMALL)
    divided, _ = saved_units(layer_of(gpt(), tp=8), SEQ // 8)
    assert divided == pytest.approx((16 + SMALL) / 8)


def test_without_sequence_parallelism_norms_and_inputs_are_whole() -> None:
    units, _ = saved_units(layer_of(gpt(), tp=8, sequence_parallel=False), SEQ)
    # Norm in, qkv in, norm in, up in: whole, with the norms' statistics. q k v, attention out, gelu in, down in: divided.
    assert units == pytest.approx(4 + 4 / HIDDEN + (3 + 1 + 4 + 4) / 8 + HEADS / HIDDEN / 8)


def test_context_parallelism_divides_it_too_and_saves_attentions_result_before_and_after_the_exchange() -> None:
    units, _ = saved_units(layer_of(gpt(), tp=4, cp=2), SEQ // 8)
    assert units == pytest.approx((16 + 1 + SMALL) / 8)


def test_around_a_ring_attentions_result_is_saved_once() -> None:
    units, _ = saved_units(layer_of(gpt(), tp=4, cp=2, cp_attention=ContextAttention.RING), SEQ // 8)
    assert units == pytest.approx((16 + SMALL) / 8)


def test_a_llama_layer_saves_a_share_of_what_one_process_saves() -> None:
    shape = preset(
        "tiny", variant="llama", vocab_size=61, max_seq=SEQ, layers=2, hidden=HIDDEN, heads=HEADS, kv_heads=8
    )
    tables = rotary_tables(SEQ, shape.head_dim, shape.rope_theta, device=torch.device("cpu"), dtype=torch.float32)
    alone, _ = saved_units(layer_of(shape, dp=8), SEQ, tables)
    divided, _ = saved_units(layer_of(shape, tp=8), SEQ // 8, tables)
    assert divided == pytest.approx(alone / 8)


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])
def test_a_tiled_mlp_saves_its_input_alone_as_a_shard(sequence: bool) -> None:
    shape = preset("tiny", vocab_size=61, max_seq=SEQ, layers=2, hidden=HIDDEN, heads=HEADS, mlp_tiles=2)
    layer = layer_of(shape, tp=8, sequence_parallel=sequence)
    units, _ = saved_units(layer, SEQ // 8 if sequence else SEQ)
    whole = (4 + SMALL - HEADS / HIDDEN) / (
        8 if sequence else 1
    )  # the norms' inputs and statistics, and what they give
    assert units == pytest.approx(whole + (4 + HEADS / HIDDEN) / 8)  # attention


def test_gate_and_up_share_one_gather_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = preset(
        "tiny", variant="llama", vocab_size=61, max_seq=SEQ, layers=2, hidden=HIDDEN, heads=HEADS, kv_heads=8
    )
    tables = rotary_tables(SEQ, shape.head_dim, shape.rope_theta, device=torch.device("cpu"), dtype=torch.float32)
    layer = layer_of(shape, tp=8)
    gathers: list[tuple[int, ...]] = []
    gathered = collectives.all_gathered

    def counted(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        gathers.append(tuple(x.shape))
        return gathered(x, *rest, **named)

    monkeypatch.setattr(collectives, "all_gathered", counted)
    monkeypatch.setattr(gathered_input, "all_gathered", counted)
    _, out = saved_units(layer, SEQ // 8, tables)
    assert len(gathers) == 2  # attention's input, the MLP's input
    gathers.clear()
    out.sum().backward()
    # The gradients of the two sums, and the two inputs once more: gate and up share theirs.
    assert len(gathers) == 4
