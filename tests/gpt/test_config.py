"""Shapes: named sizes are what their sources say, and numbers that do not fit together are one clear line."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest

from memo.errors import UsageError
from memo.gpt import PRESETS, GPTConfig, preset, preset_name, with_pattern
from memo.gpt.arithmetic import parameter_count


def test_paper_sizes_are_the_papers() -> None:
    # MEMO (SIGMOD 2025), Table 2: layers, hidden, ffn, heads, vocabulary.
    table = {
        "7b": (32, 4096, 16384, 32, 50257),
        "13b": (40, 5120, 20480, 40, 50257),
        "30b": (48, 7168, 28672, 56, 50257),
        "65b": (80, 8192, 32768, 64, 50257),
    }
    for name, row in table.items():
        config = preset(name)
        assert (config.layers, config.hidden, config.ffn, config.heads, config.vocab_size) == row
        assert (config.norm, config.mlp, config.kv_heads) == ("layernorm", "gelu", config.heads)


def test_every_preset_has_a_gpt_and_a_llama_form() -> None:
    for name in (name for name in PRESETS if not name.startswith("llama3")):
        gpt, llama = preset(name), preset(name, variant="llama")
        assert gpt == PRESETS[name]
        assert (llama.norm, llama.mlp, llama.positions, llama.bias) == ("rmsnorm", "swiglu", "rotary", False)
        assert (llama.layers, llama.hidden, llama.heads) == (gpt.layers, gpt.hidden, gpt.heads)
        assert llama.kv_heads == (llama.heads // 4 if llama.heads % 4 == 0 else llama.heads)


def test_llama_3_is_metas_and_has_one_form() -> None:
    # Grattafiori et al. 2024, Table 3, and the parameters of the published checkpoints.
    counts = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800}
    for name, count in counts.items():
        assert parameter_count(preset(name)) == count
        assert preset(name) == preset(name, variant="llama") == preset(name.upper())
        with pytest.raises(UsageError, match=f"{name} is a llama"):
            preset(name, variant="gpt")
    half = preset("llama3-8b", hidden=2048, heads=16)
    assert (half.kv_heads, half.ffn) == (4, 7168)


def test_large_sizes_are_their_papers() -> None:
    assert round(parameter_count(preset("175b")) / 1e9) == 175
    assert round(parameter_count(preset("530b")) / 1e9) == 531  # with two tables, where the paper has one


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        ("Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("llama_3.1_70b", "llama3-70b"),
        ("7B", "7b"),
        ("Llama3-405B", "llama3-405b"),
    ],
)
def test_names_are_found_by_any_case(spelled: str, meant: str) -> None:
    assert preset_name(spelled) == meant


def test_llama_7b_has_llamas_ffn() -> None:
    assert preset("7b", variant="llama").ffn == 11008


def test_dependent_fields_follow_unless_given() -> None:
    config = preset("125m", hidden=512, heads=8)
    assert (config.ffn, config.kv_heads) == (2048, 8)
    assert preset("125m", variant="llama", heads=6).kv_heads == 6
    given = preset("125m", heads=8, kv_heads=2, ffn=100)
    assert (given.kv_heads, given.ffn) == (2, 100)


def test_vocabulary_and_length_replace_the_presets() -> None:
    config = preset("tiny", vocab_size=1000, max_seq=32768)
    assert (config.vocab_size, config.max_seq) == (1000, 32768)


def test_unknown_preset_names_the_presets() -> None:
    with pytest.raises(UsageError, match=r"'900b'.*tiny.*125m.*65b"):
        preset("900b")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"heads": 7}, "7 heads do not divide"),
        ({"kv_heads": 5}, "key/value heads do not divide"),
        ({"heads": 128, "positions": "rotary"}, "even head size"),
        ({"dropout": 1.0}, "dropout"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": True}, "layers is True"),
        ({"hidden": 12.5}, "hidden is 12.5"),
        ({"norm": "batchnorm"}, "one of layernorm, rmsnorm"),
        ({"mlp": "relu"}, "one of gelu, swiglu"),
        ({"positions": "alibi"}, "one of learned, rotary"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"depth": 3}, "no field named depth"),
    ],
)
def test_numbers_that_do_not_fit_are_one_line(overrides: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        preset("tiny", **overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "numbers", "says"),
    [
        ("tiny", {"sliding_window": 0}, "less than 1 token"),
        ("tiny", {"sliding_window": -3}, "less than 1 token"),
        ("tiny", {"full_every": 2}, "no meaning without --sliding-window"),
        ("local-tiny", {"full_every": -1}, "negative"),
        ("local-tiny", {"full_every": 5}, "leaves no layer of 4 with full attention; give 0"),
    ],
)
def test_a_pattern_that_cannot_be_is_one_line(model: str, numbers: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        with_pattern(preset(model), **numbers)
    assert "\n" not in str(caught.value)


def test_the_last_of_each_few_layers_has_full_attention() -> None:
    def windows(full_every: int | None = None, tokens: float = math.inf) -> list[int | None]:
        shape = with_pattern(preset("tiny", layers=5), sliding_window=9, full_every=full_every)
        return [shape.window_of(layer, tokens) for layer in range(5)]

    assert windows() == [9, None, 9, None, 9]
    assert windows(3) == [9, 9, None, 9, 9]
    assert windows(0) == [9] * 5
    assert windows(1) == [None] * 5
    assert windows(3, tokens=10) == [9, 9, None, 9, 9]
    assert windows(3, tokens=9) == [None] * 5
    changed = with_pattern(preset("mgpt-13b"), sliding_window=256)
    assert (changed.window_of(0), changed.window_of(1)) == (256, None)
    assert with_pattern(preset("tiny")) == preset("tiny")
    assert not with_pattern(preset("tiny"), sliding_window=9, full_every=1).is_local_within(1024)


def test_unknown_variant_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="one of gpt, llama"):
        preset("tiny", variant="mamba")  # type: ignore[arg-type]


def test_config_is_frozen_and_round_trips_as_a_dict() -> None:
    config = preset("125m", variant="llama")
    assert GPTConfig(**dataclasses.asdict(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layers = 3  # type: ignore[misc]


def test_shapes_and_counts_need_no_torch() -> None:
    program = (
        "import sys, memo.gpt.config, memo.gpt.arithmetic.flops, memo.gpt.data.documents;"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
