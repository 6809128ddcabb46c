"""Norms that torch's CUDA kernels would leave wrong are refused before anything is computed. Large tensors have no bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_models import ids, stack
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import memo
from memo.errors import UsageError
from memo.gpt import preset
from memo.gpt.model import GPT, model as gpt_model, pipeline_stage as gpt_stage
from memo.gpt.model.build_rank import build_stages
from memo.machine import norm_limit, require_layer_within_norm_limit, require_within_norm_limit
from memo.machine.norm_limit import NORM_ELEMENTS
from memo.parallel import Layout, World

WIDTH = 4096
ROWS = NORM_ELEMENTS // WIDTH


def fake(rows: int, device: str = "cuda") -> torch.Tensor:
    """Has a shape and a device, and no memory."""
    with FakeTensorMode():
        return torch.empty(1, rows, WIDTH, device=device, dtype=torch.bfloat16)


class Plain(nn.Module):
    """A layer that normalises in plain operators, as Hugging Face's Llama does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def test_a_million_tokens_of_width_4096_are_right_and_one_more_is_refused() -> None:
    require_within_norm_limit(fake(ROWS), "layers.0")
    with pytest.raises(
        UsageError, match=r"layers\.0 would normalise 1 x 1048577 x 4096 = 4294971392 elements"
    ) as refused:
        require_within_norm_limit(fake(ROWS + 1), "layers.0")
    assert "\n" not in str(refused.value)
    assert "fewer tokens" in str(refused.value)


def test_a_cpu_counts_in_64_bits() -> None:
    require_within_norm_limit(fake(2 * ROWS, "cpu"), "layers.0")


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_layer_is_refused_for_torchs_norms_and_for_no_others(norm: type[nn.Module]) -> None:
    layer = nn.Sequential(nn.Linear(8, 8), norm(8))
    require_layer_within_norm_limit("layers.3", layer, fake(ROWS))
    require_layer_within_norm_limit("layers.3", Plain(), fake(ROWS + 1))
    with pytest.raises(UsageError, match=r"layers\.3 would normalise"):
        require_layer_within_norm_limit("layers.3", layer, fake(ROWS + 1))


def test_a_managed_layer_is_refused_before_it_runs_and_the_manager_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real layers are on the CPU, so what is asked of their input's device is left out here."""
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="64MiB", min_bytes=256)
    ran: list[str] = []
    model.layers[0].register_forward_hook(lambda *_: ran.append("layers.0"))
    with monkeypatch.context() as patch:
        patch.setattr(norm_limit, "NORM_ELEMENTS", 8)
        patch.setattr(norm_limit, "require_within_norm_limit", _refuse)
        with pytest.raises(UsageError, match=r"^layers\.0$"), manager:
            model(ids(0))
    assert ran == []
    with manager:
        loss = model(ids(0))
    loss.backward()
    assert ran == ["layers.0"]
    assert manager.stats.live_entries == 0
    manager.close()


def _refuse(hidden: torch.Tensor, what: str) -> None:
    raise UsageError(what)


def test_memos_own_model_asks_before_its_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.Size, str]] = []
    monkeypatch.setattr(gpt_model, "require_within_norm_limit", lambda hidden, what: asked.append((hidden.shape, what)))
    model = GPT(preset("tiny", vocab_size=64, max_seq=32))
    model.layers[0].register_forward_pre_hook(lambda *_: asked.append((torch.Size(), "the first layer")))
    model(torch.zeros(2, 7, dtype=torch.long))
    assert asked == [(torch.Size((2, 7, model.config.hidden)), "the model"), (torch.Size(), "the first layer")]


def test_a_rank_of_memos_own_model_asks_of_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.Size, str]] = []
    monkeypatch.setattr(gpt_stage, "require_within_norm_limit", lambda hidden, what: asked.append((hidden.shape, what)))
    config = preset("tiny", vocab_size=64, max_seq=64, layers=1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        world = World.of(Layout(tp=2), "cpu")
        (stage,) = build_stages(config, world, seq=64, device=torch.device("cpu"), dtype=torch.float32, seed=0)
        stage(*(torch.zeros(1, 32, dtype=torch.long) for _ in range(2)))
    finally:
        dist.destroy_process_group()
    assert asked == [(torch.Size((1, 32, config.hidden)), "a rank")]
