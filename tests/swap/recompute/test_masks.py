"""Zeros and ones that are drawn in a layer, of every shape that broadcasts: kept for the tokens that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Step, assert_equal, ids, stack, train
from torch import nn
from torch.nn import functional as F

import memo

HIDDEN = 32


def _heads(h: torch.Tensor) -> torch.Tensor:
    return h.unflatten(-1, (4, -1))


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sequences": lambda h: h * torch.empty(len(h), 1, 1).bernoulli_(0.9),
    "tokens": lambda h: h * torch.empty(1, h.shape[1], 1).bernoulli_(0.9),
    "sequences and features": lambda h: h * torch.empty(len(h), 1, h.shape[2]).bernoulli_(0.9),
    "features": lambda h: h * torch.empty(h.shape[2]).bernoulli_(0.9),
    "one number": lambda h: h * torch.empty(()).bernoulli_(0.9),
    "heads": lambda h: (_heads(h) * torch.empty(4, 1).bernoulli_(0.5)).flatten(2),
    "drawn by a gate of sequences": lambda h: h * torch.bernoulli(h.mean((1, 2), keepdim=True).sigmoid()),
    "drawn by a gate of tokens": lambda h: h * torch.bernoulli(h.mean(2, keepdim=True).sigmoid()),
    "masked_fill, sequences": lambda h: h.masked_fill(torch.empty(len(h), 1, 1).bernoulli_(0.5).bool(), 0.1),
    "masked_fill, tokens": lambda h: h.masked_fill(torch.rand(h.shape[1], 1) < 0.5, 0.1),
    "where, features": lambda h: torch.where(torch.rand(h.shape[2]) < 0.7, h, h * 0.5),
    "dropout": lambda h: F.dropout(h, 0.2),
    "native dropout": lambda h: torch.native_dropout(h, 0.3, True)[0],
    "dropout1d of tokens": lambda h: F.dropout1d(h, 0.2),
    "dropout1d of features": lambda h: F.dropout1d(h.transpose(1, 2), 0.2).transpose(1, 2),
    "dropout2d of heads": lambda h: F.dropout2d(_heads(h).transpose(1, 2), 0.3).transpose(1, 2).flatten(2),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.2, True),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h, 0.2, True),
}


class Layer(nn.Module):
    def __init__(self, mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mask = mask
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mask(F.gelu(self.up(x)))
        return x + self.down(h * h.sigmoid())


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:dropout2d")
@pytest.mark.parametrize("alpha", [0.0, 0.5, (0.2, 0.3, 0.5)])
@pytest.mark.parametrize("mask", MASKS)
def test_a_layer_with_a_drawn_mask_is_bit_equal(mask: str, alpha: Any) -> None:
    def steps(managed: bool) -> list[Step]:
        model = stack(make=lambda: Layer(MASKS[mask]))
        manager = memo.offload(model, alpha=alpha, host="16MiB", min_bytes=1) if managed else None

        def forward(step: int) -> torch.Tensor:
            torch.manual_seed(step)
            loss: torch.Tensor = model(ids(step))
            return loss

        return train(model, forward, manager)

    assert_equal(steps(True), steps(False))
