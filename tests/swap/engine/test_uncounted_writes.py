"""Writes that nothing counts, between two saves of one storage: `verify=True` finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from small_models import assert_equal, train
from torch import nn

import memo
from memo.errors import ModifiedAfterSave

if TYPE_CHECKING:
    from collections.abc import Callable


def halves_numpy(x: torch.Tensor) -> None:
    x.detach().numpy()[...] *= 0.5


def halves_by_dlpack(x: torch.Tensor) -> None:
    torch.from_dlpack(x.detach().numpy()).mul_(0.5)


def halves_the_storage(x: torch.Tensor) -> None:
    x.untyped_storage().copy_(x.detach().mul(0.5).untyped_storage())


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda x: x.data.clamp_(-0.1, 0.1),
    "numpy": halves_numpy,
    "dlpack": halves_by_dlpack,
    "storage": halves_the_storage,
}


class Model(nn.Module):
    """Each layer's result is saved by its tanh, and again by the next layer's product."""

    def __init__(self, write: Callable[[torch.Tensor], object] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh()) for _ in range(3)
        )
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.write is not None and layer is self.layers[0]:
                self.write(x)
        return x.square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("write", WRITES)
def test_verify_refuses_a_second_save_of_other_bytes(write: str, alpha: float) -> None:
    model = Model(WRITES[write])
    with (
        memo.offload(model, alpha=alpha, host="4MiB", min_bytes=1, verify=True) as manager,
        pytest.raises(ModifiedAfterSave, match="is saved again with other bytes, and nothing counted the change"),
    ):
        model(batch(0))
    model.write = None
    assert_equal(
        train(model, lambda step: model(batch(step)), manager),
        train(plain := Model(), lambda step: plain(batch(step))),
    )
    manager.close()


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_verify_passes_second_saves_of_the_same_bytes(alpha: float) -> None:
    model = Model()
    with memo.offload(model, alpha=alpha, host="4MiB", min_bytes=1, verify=True) as manager:
        model(batch(0))
    assert manager.stats.deduplicated > 0
    manager.close()
