"""Models large and small of our own and of Hugging Face, and three steps of each with and without memo."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from small_models import assert_equal, train

import memo
from memo.gpt import preset
from memo.gpt.model import GPT

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

VOCAB = 96
SEQ = 64
HF: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCAB}
GROUPED = HF | {"num_key_value_heads": 2, "intermediate_size": 80}


def token_ids(step: int, batch: int) -> torch.Tensor:
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


def ours(batch: int) -> Any:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)  # for dropout
        ids = token_ids(step, batch)
        loss: torch.Tensor = model(ids[:, :-1], ids[:, 1:])
        return loss

    return forward


def causal(batch: int, **kwargs: Any) -> Any:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        ids = token_ids(step, batch)
        loss: torch.Tensor = model(input_ids=ids, labels=ids, **kwargs).loss
        return loss

    return forward


def compare(
    make: Callable[[], nn.Module],
    forward: Any,
    tmp_path: Path,
    alpha: Any,
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
        warnings.filterwarnings("ignore", message=".*(whole tensors|is recomputed whole)", category=RuntimeWarning)
        got = train(model, lambda step: forward(model, step), manager)
    assert_equal(got, want)
    assert torch.equal(torch.get_rng_state(), random), "the stream of random numbers is the same"
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()
    assert manager.stats.device_bytes == 0
    return manager


def refused(manager: memo.Manager) -> dict[str, str]:
    use = manager.report().recompute
    assert use is not None
    return use.refused


def assert_split(manager: memo.Manager, alpha: Any) -> None:
    assert manager.report().recompute is None if alpha == 1.0 else refused(manager) == {}
    assert (manager.stats.bytes_recomputed > 0) == (alpha != 1.0)
