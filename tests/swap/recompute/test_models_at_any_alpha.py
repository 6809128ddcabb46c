"""Loss and every gradient are equal bit for bit at any alpha, whatever the model's layers are made of."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from offload_models import SEQ, assert_split, causal, compare, gpt, hugging_face, ours, refused
from small_models import assert_equal, ids, stack, train
from torch import nn

import memo
from memo.swap.recompute import trials
from memo.swap.recompute.trial import ReplayMismatch

if TYPE_CHECKING:
    from pathlib import Path

ALPHAS = [0.0, 0.25, 0.5, 0.75, 1.0]
KINDS = [
    (torch.float32, 2),
    (torch.bfloat16, 1),
    pytest.param(torch.float32, 1, marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, 2, marks=pytest.mark.slow),
]
"""Dtype and batch: in a long matrix each of them once, else all."""


@pytest.mark.covering(2)
@pytest.mark.parametrize(("dtype", "batch"), KINDS)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_our_gpt(variant: str, alpha: float, dtype: torch.dtype, batch: int, tmp_path: Path) -> None:
    assert_split(compare(lambda: gpt(variant), ours(batch), tmp_path, alpha, dtype), alpha)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("dtype", "batch"), KINDS)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_hugging_face_models_unmodified(
    name: str, alpha: float, dtype: torch.dtype, batch: int, tmp_path: Path
) -> None:
    assert_split(compare(lambda: hugging_face(name), causal(batch), tmp_path, alpha, dtype), alpha)


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("name", ["mistral", "phi3", "gemma", "neox", "opt, dropout", "bert"])
def test_more_models_are_split_and_equal(name: str, alpha: float, tmp_path: Path) -> None:
    assert_split(compare(lambda: hugging_face(name), causal(2), tmp_path, alpha), alpha)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 0.25])
@pytest.mark.parametrize("name", ["llama, eager", "gpt2, dropout", "mixtral", "mamba", "t5"])
def test_attention_written_out_experts_and_scans_are_split_and_equal(
    name: str, alpha: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert_split(compare(lambda: hugging_face(name), causal(2), tmp_path, alpha, dtype), alpha)


def test_a_split_model_says_nothing(tmp_path: Path) -> None:
    model = hugging_face("llama, eager")
    manager = memo.offload(model, alpha=0.25, disk=tmp_path, min_bytes=1024)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, lambda step: causal(1)(model, step), manager)
    assert refused(manager) == {}
    manager.close()


def test_one_warning_for_all_layers_of_one_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing of a layer can run again it moves whole, is equal all the same, and says why once."""

    def refuses(replay: Any, **options: Any) -> None:
        raise ReplayMismatch(None, "it says so")

    monkeypatch.setattr(trials, "try_out", refuses)
    model, reference = stack(), stack()
    manager = memo.offload(model, alpha=0.25, disk=tmp_path, min_bytes=512)
    with pytest.warns(RuntimeWarning, match=r"layers.0 moves whole tensors: it says so") as caught:
        got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert len(caught) == 1
    assert len(refused(manager)) == 3
    assert "it says so" in str(manager.report())
    assert manager.stats.bytes_recomputed == 0
    manager.close()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_dropout_masks_are_kept_as_bits(alpha: float, dtype: torch.dtype, tmp_path: Path) -> None:
    manager = compare(lambda: gpt("gpt", dropout=0.1), ours(2), tmp_path, alpha, dtype)
    assert_split(manager, alpha)


@pytest.mark.covering(1)
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
def test_checkpoints_around_layers_are_replaced_or_stay(reentrant: bool, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = hugging_face("llama")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        return model.train()

    manager = compare(make, causal(2, use_cache=False), tmp_path, 0.25)
    assert (manager.stats.bytes_recomputed == 0) == reentrant


class RoundsByPlace(nn.Module):
    """33 wide: what stands at the end of a tensor is computed one by one on a CPU, and rounds in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 33), nn.Linear(33, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).abs().pow(1.3))


def test_a_kernel_that_rounds_by_place_gives_the_same_bits_again(tmp_path: Path) -> None:
    """The same operators run on the same shapes."""
    model, reference = stack(make=RoundsByPlace), stack(make=RoundsByPlace)
    manager = memo.offload(model, alpha=0.0, disk=tmp_path, min_bytes=1024)
    got = train(model, lambda step: model(ids(step, batch=1)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step, batch=1))))
    use = manager.report().recompute
    assert use is not None
    assert use.refused == {}
    assert manager.stats.bytes_recomputed > 0
    manager.close()
