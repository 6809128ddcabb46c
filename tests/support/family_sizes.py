"""Sizes of small Hugging Face models, by the names that their configurations have."""

from __future__ import annotations

from typing import Any

VOCAB = 96
LAYERS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
GROUPED = {**LAYERS, "num_key_value_heads": 2, "intermediate_size": 80}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": VOCAB,
    **TOKENS,
}
