"""Mixtures of experts and hybrids of transformers: equal bit for bit, at most half moves at alpha 0."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import assert_equal, train

import memo
from benchmarks.small_architectures import build, loss_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

EXPERTS = [
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "OlmoeForCausalLM",
]
HYBRIDS = [
    "Qwen3NextForCausalLM",
    "NemotronHForCausalLM",
    "OlmoHybridForCausalLM",
    pytest.param("JambaForCausalLM", marks=pytest.mark.slow),  # a scan written out, token by token
    pytest.param("GraniteMoeHybridForCausalLM", marks=pytest.mark.slow),
]


def fresh(name: str, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(name, **options)


def moved(model: nn.Module, alpha: float, scratch: Path) -> int:
    """Bytes of one forward."""
    manager = memo.offload(model, alpha=alpha, disk=scratch, min_bytes=1)
    with manager:
        loss_of(model, 0).backward()
    with manager:
        loss_of(model, 1).backward()
    before = manager.stats.bytes_disk
    with manager:
        loss_of(model, 2)
    nbytes = manager.stats.bytes_disk - before
    manager.close()
    return nbytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*EXPERTS, *HYBRIDS])
def test_an_architecture_is_equal_at_a_fraction(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, reference = fresh(name), fresh(name)
    model.load_state_dict(reference.state_dict())
    manager = memo.offload(model, alpha=0.3, disk=tmp_path, min_bytes=1)
    got = train(model, lambda step: loss_of(model, step), manager, steps=2)
    assert manager.stats.bytes_recomputed > 0
    manager.close()
    assert_equal(got, train(reference, lambda step: loss_of(reference, step), steps=2))
    assert 2 * moved(model, 0.0, tmp_path) <= moved(model, 1.0, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_other_ways_to_compute_experts_are_equal(experts: str, tmp_path: Path) -> None:
    """A loop in Python gives each expert other rows in each call; few of them are tried out."""
    torch.manual_seed(0)
    name = "Qwen3MoeForCausalLM"
    model, reference = fresh(name, experts=experts), fresh(name, experts=experts)
    model.load_state_dict(reference.state_dict())
    manager = memo.offload(model, alpha=0.3, disk=tmp_path, min_bytes=1)
    tapes = manager._recompute_policy
    assert tapes is not None
    got = train(model, lambda step: loss_of(model, step), manager, steps=6)
    assert tapes.trials_run <= 6 * len(manager.layers) / 2
    assert manager.stats.bytes_recomputed > 0
    manager.close()
    assert_equal(got, train(reference, lambda step: loss_of(reference, step), steps=6))
