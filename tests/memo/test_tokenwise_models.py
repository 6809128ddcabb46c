"""Loss and every gradient are equal bit for bit at any alpha, or the layer says why it is not split."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import assert_equal, train

import memo
from memo.gpt.config import preset
from memo.gpt.model import GPT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

VOCAB = 96
SEQ = 64
ALPHAS = [0.0, 0.25, 0.5, 0.75, 1.0]
HF: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCAB}
GROUPED = HF | {"num_key_value_heads": 2, "intermediate_size": 80}


def tokens(step: int, batch: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, SEQ), generator=torch.Generator().manual_seed(10 + step))


def gpt(variant: str, **shape: Any) -> GPT:
    return GPT(preset("tiny", variant=variant, vocab_size=VOCAB, max_seq=128, **shape))


def hugging_face(name: str) -> nn.Module:
    import transformers as hf

    gpt2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB}
    makers: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)),
        "gpt2, dropout": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
        "llama, eager": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, attn_implementation="eager")),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=16, pad_token_id=0)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, pad_token_id=0)),
        "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**HF, intermediate_size=80, pad_token_id=0)),
        "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED, head_dim=16, pad_token_id=0)),
        "neox": lambda: hf.GPTNeoXForCausalLM(
            hf.GPTNeoXConfig(**HF, intermediate_size=80, hidden_dropout=0.0, attention_dropout=0.0)
        ),
        "opt, dropout": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(**HF, ffn_dim=80, word_embed_proj_dim=32, pad_token_id=0, dropout=0.1)
        ),
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(
                **HF,
                intermediate_size=64,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                pad_token_id=0,
            )
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0,
                decoder_start_token_id=0, pad_token_id=0,
            )
        ),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4)),
        "mamba": lambda: hf.MambaForCausalLM(
            hf.MambaConfig(hidden_size=32, num_hidden_layers=3, vocab_size=VOCAB, state_size=4, intermediate_size=64)
        ),
    }  # fmt: skip
    return makers[name]()


Forward = "Callable[[nn.Module, int], torch.Tensor]"


def ours(batch: int) -> Any:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)  # for dropout
        ids = tokens(step, batch)
        loss: torch.Tensor = model(ids[:, :-1], ids[:, 1:])
        return loss

    return forward


def causal(batch: int, **kwargs: Any) -> Any:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        ids = tokens(step, batch)
        loss: torch.Tensor = model(input_ids=ids, labels=ids, **kwargs).loss
        return loss

    return forward


def compare(
    make: Callable[[], nn.Module],
    forward: Any,
    tmp_path: Path,
    alpha: float,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> memo.Manager:
    """Three steps each way; returns the manager, closed."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return make().to(dtype).train()

    model, reference = fresh(), fresh()
    want = train(reference, lambda step: forward(reference, step))
    random = torch.get_rng_state()
    manager = memo.offload(model, alpha=alpha, **{"disk": tmp_path, "min_bytes": 1024, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*whole tensors", category=RuntimeWarning)
        got = train(model, lambda step: forward(model, step), manager)
    assert_equal(got, want)
    assert torch.equal(torch.get_rng_state(), random), "the stream of random numbers is the same"
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()
    assert manager.stats.device_bytes == 0
    return manager


def refused(manager: memo.Manager) -> dict[str, str]:
    use = manager.report().tokenwise
    assert use is not None
    return use.refused


def assert_split(manager: memo.Manager, alpha: float) -> None:
    assert manager.report().tokenwise is None if alpha == 1.0 else refused(manager) == {}
    assert (manager.stats.bytes_recomputed > 0) == (alpha < 1.0)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_our_gpt(variant: str, alpha: float, dtype: torch.dtype, batch: int, tmp_path: Path) -> None:
    assert_split(compare(lambda: gpt(variant), ours(batch), tmp_path, alpha, dtype), alpha)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_hugging_face_models_unmodified(
    name: str, alpha: float, dtype: torch.dtype, batch: int, tmp_path: Path
) -> None:
    assert_split(compare(lambda: hugging_face(name), causal(batch), tmp_path, alpha, dtype), alpha)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("name", ["mistral", "phi3", "gemma", "neox", "opt, dropout", "bert"])
def test_more_models_are_split_and_equal(name: str, alpha: float, tmp_path: Path) -> None:
    assert_split(compare(lambda: hugging_face(name), causal(2), tmp_path, alpha), alpha)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama, eager", "bmm mixes tokens"),
        ("gpt2, dropout", "bernoulli_ draws random numbers that cannot be repeated"),  # on attention's scores
        ("mixtral", "not known to work token by token"),
        ("mamba", "not known to work token by token"),
        ("t5", "bmm mixes tokens"),
    ],
)
def test_a_layer_that_cannot_be_split_moves_whole_says_why_once_and_is_equal(
    name: str, reason: str, tmp_path: Path
) -> None:
    manager = compare(lambda: hugging_face(name), causal(2), tmp_path, 0.25)
    assert any(reason in why for why in refused(manager).values())
    assert manager.stats.bytes_recomputed == 0
    assert reason in str(manager.report())


def test_one_warning_for_all_layers_of_one_reason(tmp_path: Path) -> None:
    model = hugging_face("llama, eager")
    manager = memo.offload(model, alpha=0.25, disk=tmp_path, min_bytes=1024)
    with pytest.warns(RuntimeWarning, match=r"model.layers.0 moves whole tensors .* mixes tokens") as caught:
        train(model, lambda step: causal(1)(model, step), manager)
    assert len(caught) == 1
    assert len(refused(manager)) == 3
    manager.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_dropout_masks_are_kept_as_bits(alpha: float, dtype: torch.dtype, tmp_path: Path) -> None:
    manager = compare(lambda: gpt("gpt", dropout=0.1), ours(2), tmp_path, alpha, dtype)
    assert_split(manager, alpha)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_left_padding_mask(alpha: float, cache: bool, tmp_path: Path) -> None:
    mask = torch.ones(2, SEQ, dtype=torch.long)
    mask[0, :9] = 0
    assert_split(
        compare(lambda: hugging_face("llama"), causal(2, attention_mask=mask, use_cache=cache), tmp_path, alpha), alpha
    )


@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_autocast(alpha: float, variant: str, tmp_path: Path) -> None:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = ours(2)(model, step)
        return loss

    assert_split(compare(lambda: gpt(variant), forward, tmp_path, alpha), alpha)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_left_to_their_checkpoint(reentrant: bool, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = hugging_face("llama")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        return model.train()

    assert compare(make, causal(2, use_cache=False), tmp_path, 0.25).stats.bytes_recomputed == 0


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_an_odd_division_in_double_precision_is_within_the_stated_bound(name: str, tmp_path: Path) -> None:
    """A product of another height may take another kernel (FP64 on CPU does): then gradients differ by roundings alone."""
    torch.manual_seed(0)
    model, reference = gpt(name).double(), gpt(name).double()
    reference.load_state_dict(model.state_dict())
    manager = memo.offload(model, alpha=0.97, disk=tmp_path, min_bytes=1024)  # leaves two tokens
    with manager:
        loss = ours(1)(model, 0)
    loss.backward()
    ours(1)(reference, 0).backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert (got.grad - want.grad).norm() <= 1e-13 * want.grad.norm()
    use = manager.report().tokenwise
    assert use is not None
    assert use.refused == {}
    assert 0.0 <= use.deviation <= 1.0
    manager.close()
