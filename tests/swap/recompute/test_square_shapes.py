"""Sequences as long as something else of the model is wide: the layer is divided all the same, and gradients are equal."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch

import memo

transformers = pytest.importorskip("transformers")

if TYPE_CHECKING:
    from pathlib import Path

WIDE, HEADS, HEAD = 32, 4, 16


def llama() -> torch.nn.Module:
    """Hidden, intermediate and vocabulary are equally wide."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WIDE,
        hidden_size=WIDE,
        intermediate_size=WIDE,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


@pytest.mark.covering(1)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(
    "shape",
    [(2, WIDE), (WIDE, WIDE), (2, HEAD), (HEAD, HEAD), (2, HEADS), (HEADS, HEADS), (HEADS * WIDE, WIDE)],
    ids=str,
)
def test_a_sequence_as_long_as_something_is_wide(shape: tuple[int, int], padded: bool, tmp_path: Path) -> None:
    model, reference = llama(), llama()
    manager = memo.offload(model, disk=tmp_path, min_bytes=64, alpha=0.25)
    ids = torch.randint(0, WIDE, shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, -1] = 0 if padded else 1

    def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
        loss = module(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        grads = [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        module.zero_grad()
        return grads

    want = gradients(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2):  # where a table could be a mask, the first call tells
            with manager:
                got = gradients(model)
            assert len(got) == len(want) > 10
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    use = manager.report().recompute
    assert use is not None
    assert use.refused == {}
    assert manager.stats.bytes_recomputed > 0
    manager.close()
