"""Unmodified models of many families, half of what they save recomputed: bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sizes import GROUPED, LAYERS, STACKS, TOKENS, VOCAB
from small_models import assert_equal, train
from torch import nn

import memo

hf = pytest.importorskip("transformers")

PAIRS = {**STACKS, "dropout": 0.0}
SOUND = {"num_mel_bins": 8, "max_source_positions": 60, "max_target_positions": 64}
# transformers 5.17 runs it through fused attention by default, 5.23 does not.
IN_FULL = {"head_dim": 8, "attn_implementation": "eager"}
IMAGES = {"intermediate_size": 64, "image_size": 32, "patch_size": 4}

Forward = Callable[[nn.Module, int], torch.Tensor]


def ids(step: int, seq: int = 64) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, seq), generator=torch.Generator().manual_seed(step))


def next_token(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids(step), labels=ids(step)).loss
    return loss


def translated(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids(step), labels=ids(step + 9, 48)).loss
    return loss


def heard(model: nn.Module, step: int) -> torch.Tensor:
    sound = torch.randn(2, 8, 120, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(input_features=sound, labels=ids(step, 48)).loss
    return loss


def seen(model: nn.Module, step: int) -> torch.Tensor:
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(pixel_values=image, labels=torch.tensor([0, 1])).loss
    return loss


# Class, configuration and forward; attention fused or written out, scans, experts.
DIVIDED: dict[str, tuple[str, dict[str, Any], Forward]] = {
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, **TOKENS, "sliding_window": 16}, next_token),
    "Qwen2ForCausalLM": ("Qwen2Config", {**GROUPED, **TOKENS}, next_token),
    "Phi3ForCausalLM": ("Phi3Config", {**GROUPED, **TOKENS}, next_token),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**GROUPED, **TOKENS, "head_dim": 8}, next_token),
    "OPTForCausalLM": ("OPTConfig", {**LAYERS, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}, next_token),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {**LAYERS, "intermediate_size": 64}, next_token),
    "BartForConditionalGeneration": ("BartConfig", {**PAIRS, "decoder_start_token_id": 2}, translated),
    "WhisperForConditionalGeneration": ("WhisperConfig", {**PAIRS, **SOUND, "decoder_start_token_id": 1}, heard),
    "ViTForImageClassification": ("ViTConfig", {**LAYERS, **IMAGES}, seen),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, **TOKENS, **IN_FULL}, next_token),
    "BloomForCausalLM": ("BloomConfig", {**LAYERS, **TOKENS}, next_token),
    "MambaForCausalLM": ("MambaConfig", {**LAYERS, "state_size": 4}, next_token),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, **TOKENS, "num_local_experts": 4}, next_token),
}


def compare(name: str, config: str, shape: dict[str, Any], forward: Forward, disk: Path) -> memo.Manager:
    """Two steps each way, dropout off; returns the manager, closed."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = getattr(hf, name)(getattr(hf, config)(**shape))
        return made

    model, reference = fresh(), fresh()
    manager = memo.offload(model, alpha=0.5, disk=disk, min_bytes=512)
    got = train(model, lambda step: forward(model, step), manager, steps=2)
    assert_equal(got, train(reference, lambda step: forward(reference, step), steps=2))
    assert manager.stats.bytes_disk > 0
    manager.close()
    return manager


@pytest.mark.parametrize("name", DIVIDED)
def test_layers_are_divided_bit_for_bit(name: str, tmp_path: Path) -> None:
    manager = compare(name, *DIVIDED[name], tmp_path)
    assert f"a part of {len(manager.layers)} of {len(manager.layers)} layers, bit for bit" in str(manager.report())
    assert manager.stats.bytes_recomputed > 0


class _LowRank(nn.Module):
    """A frozen projection and a trained correction of it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + 2 * self.up(self.down(x))
        return out


def _adapted() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)).requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj = _LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = _LowRank(layer.self_attn.v_proj)
    return model


def test_low_rank_adapters_of_a_frozen_model(tmp_path: Path) -> None:
    """The first layer's input needs no gradient; most parameters get none."""
    model, reference = _adapted(), _adapted()
    manager = memo.offload(model, alpha=0.5, disk=tmp_path, min_bytes=512)
    got = train(model, lambda step: next_token(model, step), manager)
    assert_equal(got, train(reference, lambda step: next_token(reference, step)))
    assert sum(grad is not None for grad in got[0].gradients) == 2 * 2 * 2
    manager.close()
    assert "a part of 2 of " in str(manager.report())
