"""Published models by name, as far as a plan needs their configurations: sizes, experts, windows.

Each entry has its source. What is not given is the architecture's default in transformers. Needs no torch.
"""

from __future__ import annotations

import dataclasses
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


PUBLISHED: dict[str, Published] = {
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
    key = preset_key(name.rpartition("/")[2])
    return next((known for known in PUBLISHED if known == key), None)
