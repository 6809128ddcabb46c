"""A model's cache of keys and values holds them on the device behind the report's back: said once, where it matters."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memo


@pytest.mark.parametrize(("tokens", "cache", "said"), [(2048, True, 1), (2048, False, 0), (64, True, 0)])
def test_a_cache_is_said_once(tokens: int, cache: bool, said: int) -> None:
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=2,
        vocab_size=61,
        use_cache=cache,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    manager = memo.offload(model, alpha=0.0, host="64MiB")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with manager:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
    assert len([one for one in told if "use_cache=False" in str(one.message)]) == said
    manager.close()
