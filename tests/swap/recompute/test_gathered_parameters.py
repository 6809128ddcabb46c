"""Layers whose parameters are there only while their own modules run (ZeRO-3) are divided, and nothing keeps them there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from gathered_parameters import Gathered, Linear
from torch import nn

import memo


class Scaled(nn.Module):
    """A pre-norm block with a parameter of its own, gathered around all of its forward."""

    def __init__(self, hidden: int = 32, *, own: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = Linear(hidden, 3 * hidden), Linear(hidden, hidden)
        self.up, self.down = Linear(hidden, 4 * hidden), Linear(4 * hidden, hidden)
        self.scale = nn.Parameter(torch.rand(hidden)) if own else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (t.view(batch, seq, 2, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        if self.scale is not None:
            x = x * self.scale
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh").sigmoid())


def steps(alpha: float | None, **how: Any) -> tuple[list[torch.Tensor], list[int], int]:
    """Gradients of three steps, the gathered bytes alive after each forward, and the bytes that moved."""
    torch.manual_seed(0)
    own = how.pop("own", False)
    model = nn.Sequential(*(Scaled(own=own) for _ in range(3)))
    gathered = Gathered(model, **how)
    manager = (
        None if alpha is None else memo.offload(model, alpha=alpha, host="8MiB", min_bytes=256, layers=list(model))
    )
    found, alive = [], []
    for step in range(3):
        x = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
        if manager is None:
            loss = model(x).square().mean()
        else:
            with manager:
                loss = model(x).square().mean()
        if how.get("keeps"):
            gathered.release()
        gc.collect()
        alive.append(gathered.alive)
        loss.backward()
        assert x.grad is not None
        found += [x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
        for parameter in model.parameters():
            parameter.grad = None
    assert len(found) == 3 * (1 + len(list(model.parameters())))
    if manager is None:
        return found, alive, 0
    use = manager.report().recompute
    assert use is None or use.refused == {}, use
    assert manager.stats.live_entries == 0
    manager.close()
    return found, alive, manager.stats.bytes_host


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_layers_are_divided_and_equal_though_their_parameters_are_gone_in_backward(own: bool, keeps: bool) -> None:
    want, held, _ = steps(None, own=own, keeps=keeps)
    _, _, most = steps(1.0, own=own, keeps=keeps)
    for alpha in (1.0, 0.5, 0.0):
        got, alive, moved = steps(alpha, own=own, keeps=keeps)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(ours <= theirs for ours, theirs in zip(alive, held, strict=True))
    assert 0 < moved <= 0.6 * most
