"""Loss and every gradient are equal to the last bit with and without memo, on our GPT and on unmodified models."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import assert_equal, train

import memo
from memo.gpt import preset
from memo.gpt.model import GPT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

VOCAB = 96
TIERS: dict[str, dict[str, Any]] = {
    "disk": {},
    "host": {"host": "64MiB", "disk": []},
    "both": {"host": "200KiB"},
}


def tokens(step: int, batch: int, seq: int = 64) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(10 + step))


def gpt(variant: str) -> GPT:
    return GPT(preset("tiny", variant=variant, vocab_size=VOCAB, max_seq=128))


def hugging_face(name: str) -> nn.Module:
    import transformers as hf

    common: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCAB}
    if name == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_embd=32, n_layer=3, n_head=4, vocab_size=VOCAB, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
            )
        )
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**common, num_key_value_heads=2, intermediate_size=80))
    if name == "qwen3":
        return hf.Qwen3ForCausalLM(
            hf.Qwen3Config(**common, num_key_value_heads=2, intermediate_size=80, head_dim=16, pad_token_id=0)
        )
    if name == "bert":
        return hf.BertForMaskedLM(
            hf.BertConfig(
                **common,
                intermediate_size=64,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                pad_token_id=0,
            )
        )
    assert name == "t5"
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def compare(
    make: Callable[[], nn.Module],
    forward: Callable[[nn.Module, int], torch.Tensor],
    tmp_path: Path,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    **options: Any,
) -> memo.Manager:
    """Some steps each way; returns the manager, closed."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return make().to(dtype)

    model, reference = fresh(), fresh()
    manager = memo.offload(model, **{"disk": tmp_path, "min_bytes": 1024, "alpha": 1.0, **options})
    got = train(model, lambda step: forward(model, step), manager, steps)
    want = train(reference, lambda step: forward(reference, step), steps=steps)
    assert_equal(got, want)
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()
    assert manager.stats.bytes_disk + manager.stats.bytes_host > 0
    return manager


@pytest.mark.covering(2)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_our_gpt(variant: str, dtype: torch.dtype, batch: int, tier: str, tmp_path: Path) -> None:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        ids = tokens(step, batch)
        loss: torch.Tensor = model(ids[:, :-1], ids[:, 1:])
        return loss

    compare(lambda: gpt(variant), forward, tmp_path, dtype, **TIERS[tier])


def causal(batch: int = 2, **kwargs: Any) -> Callable[[nn.Module, int], torch.Tensor]:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        ids = tokens(step, batch)
        loss: torch.Tensor = model(input_ids=ids, labels=ids, **kwargs).loss
        return loss

    return forward


@pytest.mark.covering(2)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "bert", "t5"])
def test_hugging_face_models_unmodified(name: str, dtype: torch.dtype, batch: int, tmp_path: Path) -> None:
    manager = compare(lambda: hugging_face(name), causal(batch), tmp_path, dtype)
    assert len(manager.layers) == (6 if name == "t5" else 3)


@pytest.mark.filterwarnings("ignore:(en|de)coder.block.0 moves whole tensors:RuntimeWarning")  # T5 writes attention out
def test_an_encoder_and_a_decoder_of_another_length_are_measured_and_planned_as_one(tmp_path: Path) -> None:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens(step, 2), labels=tokens(step + 9, 2, seq=48)).loss
        return loss

    manager = compare(lambda: hugging_face("t5"), forward, tmp_path, steps=5, alpha=None)
    assert manager.plan is not None
    assert len(manager.plan.layers) == 6


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hugging_face_attention_implementations(name: str, attention: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = hugging_face(name)
        model.set_attn_implementation(attention)  # type: ignore[operator]
        return model

    compare(make, causal(use_cache=True), tmp_path)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hugging_face_gradient_checkpointing_is_replaced_or_stays(name: str, reentrant: bool, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = hugging_face(name)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        return model.train()

    manager = compare(make, causal(use_cache=False), tmp_path)
    assert manager.report().replaced == (0 if reentrant else len(manager.layers))
    assert (manager.stats.bytes_disk <= 3 * 3 * (2 * 64 * 32 * 4)) == reentrant  # at most the layers' inputs


def test_left_padding_mask(tmp_path: Path) -> None:
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[0, :9] = 0
    compare(lambda: hugging_face("llama"), causal(attention_mask=mask), tmp_path)


def test_dropout_keeps_its_stream_of_random_numbers(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return GPT(preset("tiny", vocab_size=VOCAB, max_seq=128, dropout=0.1)).train()

    def forward(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        ids = tokens(step, 2)
        loss: torch.Tensor = model(ids[:, :-1], ids[:, 1:])
        return loss + 0 * torch.rand(())  # the state after the layers is the same too

    compare(make, forward, tmp_path)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_autocast(name: str, tmp_path: Path) -> None:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        ids = tokens(step, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = model(ids[:, :-1], ids[:, 1:])
        return loss

    compare(lambda: gpt(name), forward, tmp_path)
