"""diffusers' transformers with and without memo: the blocks of two streams that attend together are divided, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from integrations import MIN_BYTES, STEPS, Run, assert_divided, assert_same, run_of
from torch import nn

import memo

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=3,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=3,
    )


def step_of_sd3(model: nn.Module, random: Callable[..., torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(
        random(2, 4, 16, 16), random(2, 48, 32), random(2, 64), torch.tensor([100.0, 700.0])
    ).sample
    return out


def step_of_flux(model: nn.Module, random: Callable[..., torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(
        hidden_states=random(2, 144, 4),
        encoder_hidden_states=random(2, 48, 32),
        pooled_projections=random(2, 32),
        timestep=torch.tensor([0.1, 0.7]),
        img_ids=torch.zeros(144, 3),
        txt_ids=torch.zeros(48, 3),
    ).sample
    return out


def step_of_wan(model: nn.Module, random: Callable[..., torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(random(1, 4, 3, 16, 16), torch.tensor([500]), random(1, 24, 32)).sample
    return out


MODELS: dict[str, tuple[Any, Any, int]] = {
    "sd3": (sd3, step_of_sd3, 3),
    "flux": (flux, step_of_flux, 6),
    "wan": (wan, step_of_wan, 3),
}


def trained(name: str, alpha: float | None) -> tuple[Run, memo.Manager | None]:
    make, step, _ = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    manager = None
    if alpha is not None:
        manager = memo.offload(model, alpha=alpha, min_bytes=MIN_BYTES).attach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        loss = step(model, lambda *shape, g=generator: torch.randn(*shape, generator=g)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return run_of(model, losses), manager


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_blocks_of_a_diffusion_transformer_are_divided_and_losses_equal(name: str, alpha: float) -> None:
    want, _ = trained(name, None)
    got, manager = trained(name, alpha)
    assert_same(got, want)
    assert manager is not None
    assert_divided(manager, MODELS[name][2])
    if alpha == 0:  # the joint attention is kept, and nearly all else is replayed
        shown = manager.explain(0)
        assert shown.used.kept_fraction <= 0.15, shown
    manager.close()
