"""What replays read and the program writes through `.data` between forward and backward, which nothing counts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import memo
from memo.errors import ModifiedAfterSave


class Shifted(nn.Module):
    """Autograd saves no shift: a replay of the sine reads it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.shift = torch.full((64,), 0.5) if size == 64 else torch.full((1, 128, 64), 0.5)
        self.other: Shifted | None = None

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.other is not None:
            self.other.shift.data.add_(1)
        return x + self.down(((self.linear(x) + self.shift).sin() + scale).cos())


def step(alpha: Any, *, size: int = 64, across: bool = False, min_bytes: int = 40 << 10) -> list[torch.Tensor]:
    """Gradients of a step with writes through `.data` after its forward, or by its second layer into its first one's."""
    torch.manual_seed(0)
    model = nn.ModuleList(Shifted(size) for _ in range(3))
    manager = (
        None if alpha is None else memo.offload(model, layers=[*model], alpha=alpha, host="4MiB", min_bytes=min_bytes)
    )
    if across:
        object.__setattr__(model[1], "other", model[0])
    scale = torch.tensor(0.25)
    with manager or contextlib.nullcontext():
        x = torch.linspace(-1, 1, 2 * 128 * 32).view(2, 128, 32)
        for layer in model:
            x = layer(x, scale)
    if not across:
        scale.data.fill_(3.0)
        for layer in model:
            layer.shift.data.add_(1)  # type: ignore[union-attr, operator]
    try:
        x.sum().backward()
    finally:
        if manager is not None:
            manager.close()
    if manager is not None:
        assert manager.stats.bytes_recomputed > 0
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("alpha", [0.5, 0.0], ids=str)
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("min_bytes", [1, 40 << 10])
def test_small_constants_may_change(alpha: Any, across: bool, min_bytes: int) -> None:
    assert all(map(torch.equal, step(alpha, across=across, min_bytes=min_bytes), step(None, across=across)))


def test_a_layer_must_not_write_into_what_another_reads() -> None:
    with pytest.raises(ModifiedAfterSave, match="another layer's forward"):
        step(0.0, size=8192, across=True)
