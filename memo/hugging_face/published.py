"""Published models by name, as far as a plan needs their configurations: sizes, experts, windows.

Each entry has its source. What is not given is the architecture's default in transformers. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from memo.gpt import preset_key

__all__ = ["PUBLISHED", "Published", "published_name"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published model."""

    config: Mapping[str, Any]
    """Fields of its configuration in transformers."""
    source: str
    """Repository on huggingface.co whose config.json has them."""


def _qwen3(
    source: str, *, layers: int, hidden: int, heads: int, ffn: int, tied: bool = False, **others: Any
) -> Published:
    config = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": ffn,
        "tie_word_embeddings": tied,
    }
    return Published(config={**config, **others}, source=f"Qwen/{source}")


def _qwen3_moe(source: str, *, layers: int, hidden: int, heads: int, ffn: int, expert: int) -> Published:
    return _qwen3(
        source,
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        model_type="qwen3_moe",
        num_key_value_heads=4,
        moe_intermediate_size=expert,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )


def _gpt_oss(source: str, *, layers: int, experts: int) -> Published:
    config = {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    }
    return Published(config=config, source=f"openai/{source}")


def _mixtral(source: str, *, layers: int, hidden: int, heads: int, ffn: int) -> Published:
    config = {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": ffn,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    return Published(config=config, source=f"mistralai/{source}")


def _llama3(source: str, *, layers: int, hidden: int, heads: int, ffn: int, **others: Any) -> Published:
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": ffn,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return Published(config={**config, **others}, source=f"meta-llama/{source}")


_LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA31: dict[str, Any] = {"max_position_embeddings": 131072, "rope_scaling": _LLAMA31_ROPE}
_LLAMA32: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rope_scaling": {**_LLAMA31_ROPE, "factor": 32.0},
    "tie_word_embeddings": True,
}


def _qwen2(
    source: str, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **others: Any
) -> Published:
    config = {
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return Published(config={**config, **others}, source=f"Qwen/{source}")


def _qwen25_vl(source: str, **sizes: Any) -> Published:
    text = _qwen2(source, max_position_embeddings=128000, **sizes)
    others = {
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": text.config["hidden_size"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }
    return Published(config={**text.config, **others}, source=text.source)


def _mistral(source: str, **others: Any) -> Published:
    config = {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    }
    return Published(config={**config, **others}, source=f"mistralai/{source}")


def _gemma2(source: str, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Published:
    config = {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "intermediate_size": ffn,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    return Published(config=config, source=f"google/{source}")


def _gemma3(source: str, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Published:
    config = {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "intermediate_size": ffn,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }
    return Published(config=config, source=f"google/{source}")


PUBLISHED: dict[str, Published] = {
    "llama-3-8b": _llama3("Meta-Llama-3-8B", layers=32, hidden=4096, heads=32, ffn=14336),
    "llama-3-70b": _llama3("Meta-Llama-3-70B", layers=80, hidden=8192, heads=64, ffn=28672),
    "llama-3.1-8b": _llama3("Llama-3.1-8B", layers=32, hidden=4096, heads=32, ffn=14336, **_LLAMA31),
    "llama-3.1-70b": _llama3("Llama-3.1-70B", layers=80, hidden=8192, heads=64, ffn=28672, **_LLAMA31),
    "llama-3.2-1b": _llama3("Llama-3.2-1B", layers=16, hidden=2048, heads=32, ffn=8192, head_dim=64, **_LLAMA32),
    "llama-3.2-3b": _llama3("Llama-3.2-3B", layers=28, hidden=3072, heads=24, ffn=8192, head_dim=128, **_LLAMA32),
    "mistral-7b": _mistral("Mistral-7B-v0.1"),
    "gemma-2-9b": _gemma2("gemma-2-9b", layers=42, hidden=3584, heads=16, kv_heads=8, ffn=14336),
    "gemma-3-1b": _gemma3("gemma-3-1b-pt", layers=26, hidden=1152, heads=4, kv_heads=1, ffn=6912),
    "qwen2.5-0.5b": _qwen2(
        "Qwen2.5-0.5B",
        layers=24,
        hidden=896,
        heads=14,
        kv_heads=2,
        ffn=4864,
        vocab=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _qwen2("Qwen2.5-7B", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocab=152064),
    "qwen2.5-vl-7b": _qwen25_vl(
        "Qwen2.5-VL-7B-Instruct", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocab=152064
    ),
    "qwen3-0.6b": _qwen3("Qwen3-0.6B", layers=28, hidden=1024, heads=16, ffn=3072, tied=True),
    "qwen3-1.7b": _qwen3("Qwen3-1.7B", layers=28, hidden=2048, heads=16, ffn=6144, tied=True),
    "qwen3-4b": _qwen3("Qwen3-4B", layers=36, hidden=2560, heads=32, ffn=9728, tied=True),
    "qwen3-8b": _qwen3("Qwen3-8B", layers=36, hidden=4096, heads=32, ffn=12288),
    "qwen3-14b": _qwen3("Qwen3-14B", layers=40, hidden=5120, heads=40, ffn=17408),
    "qwen3-32b": _qwen3("Qwen3-32B", layers=64, hidden=5120, heads=64, ffn=25600),
    "qwen3-30b-a3b": _qwen3_moe("Qwen3-30B-A3B", layers=48, hidden=2048, heads=32, ffn=6144, expert=768),
    "qwen3-235b-a22b": _qwen3_moe("Qwen3-235B-A22B", layers=94, hidden=4096, heads=64, ffn=12288, expert=1536),
    "gpt-oss-20b": _gpt_oss("gpt-oss-20b", layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss("gpt-oss-120b", layers=36, experts=128),
    "mixtral-8x7b": _mixtral("Mixtral-8x7B-v0.1", layers=32, hidden=4096, heads=32, ffn=14336),
    "mixtral-8x22b": _mixtral("Mixtral-8x22B-v0.1", layers=56, hidden=6144, heads=48, ffn=16384),
}


def published_name(name: str) -> str | None:
    """The key of PUBLISHED that a name means, by any case, a repository's name included; None for none."""
    key = _spelling(name.rpartition("/")[2])
    return next((known for known in PUBLISHED if key in _SPELLINGS[known]), None)


def _spelling(name: str) -> str:
    """As preset_key, with the release of a Llama 3, which changes its positions, and without Gemma's kinds of training."""
    key = re.sub(r"-(it|pt)$", "", preset_key(name))
    release = re.match(r"(?:meta-)?llama-?3\.([123])-", re.sub(r"[\s_]+", "-", name.strip().lower()))
    return key if release is None else key.replace("llama3-", f"llama3.{release[1]}-", 1)


_SPELLINGS = {known: {_spelling(known), _spelling(one.source.partition("/")[2])} for known, one in PUBLISHED.items()}
"""Names of each model: its own, and its repository's."""
