"""Counts: formulas against the model itself, and against FLOPs counted while it runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from memo.gpt import PRESETS, GPTConfig, Variant, preset
from memo.gpt.arithmetic import flops
from memo.gpt.model import GPT


def _parameters(config: GPTConfig) -> int:
    return sum(parameter.numel() for parameter in GPT(config, device="meta").parameters())


@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("llama3")])
def test_parameter_count_is_the_sum_of_the_parameters(name: str, variant: Variant) -> None:
    config = preset(name, variant=variant)
    assert flops.parameter_count(config) == _parameters(config)


@pytest.mark.parametrize(("name", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85)])
def test_llama_3_has_its_published_number_of_parameters(name: str, billions: float) -> None:
    config = preset(name)
    assert flops.parameter_count(config) == _parameters(config)
    assert flops.parameter_count(config) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    "overrides",
    [
        {"bias": False},
        {"tie_embeddings": False},
        {"norm": "rmsnorm"},
        {"mlp": "swiglu"},
        {"positions": "rotary", "kv_heads": 1},
        {"vocab_size": 1000, "max_seq": 77, "ffn": 99},
    ],
)
def test_parameter_count_follows_every_field(overrides: dict[str, object]) -> None:
    config = preset("tiny", **overrides)
    assert flops.parameter_count(config) == _parameters(config)
    block = GPT(config, device="meta").layers[0]
    assert flops.layer_parameter_count(config) == sum(parameter.numel() for parameter in block.parameters())


def test_gpt2_has_its_published_size() -> None:
    assert flops.parameter_count(preset("125m")) == 124_439_808


@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_six_n_is_what_the_matrices_of_a_step_cost(variant: Variant) -> None:
    # Counted with torch's counter, which counts attention as the full square and whose flash backward redoes the
    # scores: 4 s h forward and 10 s h backward. The rest is 6N exactly.
    config, seq = preset("tiny", variant=variant, heads=4, max_seq=64), 64
    model = GPT(config)
    tokens = torch.randint(0, config.vocab_size, (1, seq))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    total = counter.get_total_flops()
    by_kind = counter.get_flop_counts()["Global"]
    attention = sum(flops for kind, flops in by_kind.items() if "attention" in str(kind))
    assert total - attention == 6 * flops.matmul_parameter_count(config) * seq


def test_formulas_are_the_named_ones() -> None:
    config, seq = preset("7b"), 1 << 20
    n, pair = flops.matmul_parameter_count(config), config.layers * config.hidden * seq
    assert flops.flops_per_token(config, seq) == 6 * n + 6 * pair
    assert flops.flops_per_token(config, seq, causal=False) == 6 * n + 12 * pair


def test_recompute_is_of_all_but_the_last_projection() -> None:
    config = preset("tiny")
    again = flops.recompute_flops_per_token(config, 0.5)
    # Two FLOPs per weight, all but the last projection, half of the tokens.
    h, ffn = config.hidden, config.ffn
    assert again == 2 * config.layers * (h * 3 * h + h * h + h * ffn) / 2
