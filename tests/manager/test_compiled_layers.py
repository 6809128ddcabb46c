"""Regional compilation, the documented way: each layer compiled by itself, under a manager, without a graph break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import assert_equal, train
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

import memo
from memo.gpt import preset
from memo.gpt.model import GPT

VOCABULARY = 61


def llama() -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(preset("tiny", vocab_size=VOCABULARY, layers=3, hidden=32, heads=2, kv_heads=2, ffn=64, max_seq=64))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(step))
    if isinstance(model, GPT):
        return model(tokens).float().logsumexp(-1).mean()  # type: ignore[no-any-return]
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [llama, gpt])
def test_layers_compiled_one_by_one_have_no_break_and_one_graph(make: Callable[[], nn.Module]) -> None:
    def compiled() -> nn.Module:
        model = make()
        manager = memo.offload(model, alpha=1.0)
        for layer in manager.layers:
            layer.module.compile(backend="aot_eager")
        manager.close()
        torch._dynamo.reset()
        counters.clear()
        return model

    reference = compiled()
    want = train(reference, lambda step: loss_of(reference, step))
    graphs = counters["stats"]["unique_graphs"]
    model = compiled()
    manager = memo.offload(model, alpha=0.25, host="8MiB", min_bytes=256)
    got = train(model, lambda step: loss_of(model, step), manager)
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == graphs
    assert_equal(got, want)
    assert manager.stats.bytes_host > 0
    manager.close()
