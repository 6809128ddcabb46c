"""memo.keep: a tensor that stays on the device, whoever saves it, before or after the call."""

from __future__ import annotations

import pytest
import torch
from small_models import assert_equal, train
from torch import nn

import memo

HIDDEN, TOKENS = 32, 64


class Layer(nn.Module):
    """Its middle tensor is saved twice: by the activation that makes it, before the mark, and by a product, after it."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.keeps = keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = torch.sigmoid(self.up(x))
        if self.keeps:
            middle = memo.keep(middle)
        return x + self.down(middle) * middle.mean()


def model(*, keeps: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(keeps=keeps) for _ in range(4))


def loss(layers: nn.ModuleList, step: int) -> torch.Tensor:
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step))
    for layer in layers:
        x = layer(x)
    return x.square().mean()


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_a_kept_tensor_neither_moves_nor_is_replayed(alpha: float) -> None:
    reference = model(keeps=False)
    want = train(reference, lambda step: loss(reference, step))
    moved, repeated = [], []
    for keeps in (False, True):
        layers = model(keeps=keeps)
        manager = memo.offload(layers, layers=layers, alpha=alpha, host="8MiB", min_bytes=256)
        assert_equal(train(layers, lambda step, layers=layers: loss(layers, step), manager), want)
        moved.append(manager.stats.bytes_host + manager.stats.bytes_disk)
        repeated.append(manager.stats.bytes_recomputed)
        assert manager.stats.live_entries == 0
        manager.close()
    middle = TOKENS * 4 * HIDDEN * 4
    if alpha == 1:
        assert moved[0] - moved[1] >= 3 * 3 * middle  # the last layer's does not leave, as backward begins with it
    else:
        assert repeated[1] < repeated[0]
        assert moved[1] <= moved[0]
