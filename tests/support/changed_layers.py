"""Layers, settings and steps for tests of what a program changes between forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Stack, assert_equal, gradients, ids, train
from torch import nn
from torch.nn import functional as F

from memo.swap import Level

if TYPE_CHECKING:
    from collections.abc import Callable

    import memo


RECOMPUTES = [
    {"alpha": 0.0},
    {"alpha": (0, 1, 0)},
    {"alpha": None, "levels": dict.fromkeys(range(3), Level.SAVE_INPUT)},
]
by_recompute = pytest.mark.parametrize("how", RECOMPUTES, ids=["attention", "matmuls", "input"])


def on_ids(model: Stack) -> Callable[[int], torch.Tensor]:
    return lambda step: model(ids(step))


def trains_equally(
    offload: Callable[..., memo.Manager],
    how: dict[str, Any],
    make: Callable[[], Stack],
    forward: Callable[[Stack], Callable[[int], torch.Tensor]] = on_ids,
) -> None:
    """Trains with memo and without it, to the same bits; something is replayed."""
    model, reference = make(), make()
    manager = offload(model, **how)
    assert_equal(train(model, forward(model), manager), train(reference, forward(reference)))
    assert manager.stats.bytes_recomputed > 0


class Finds(nn.Module):
    """What it does depends on what it holds: attributes, numbers in lists, parts of a table, constants, tensors."""

    elsewhere = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.act: nn.Module = nn.GELU()
        self.scale = 1.0
        self.register_buffer("table", torch.linspace(0.5, 2.0, 100))
        self.settings: dict[str, Any] = {
            "scale": 1.0, "act": F.gelu, "shift": torch.zeros(64), "over": 3, "start": 0, "constant": 0.5, "which": 0
        }  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Finds.elsewhere:
            x = x.exp().log()
        choice = self.settings
        y = choice["act"](self.up(self.norm(x)) + choice["shift"]) * choice["scale"]
        y = y * self.table[choice["start"] : choice["start"] + 64]  # type: ignore[index]
        squares = y.unflatten(-1, (8, 8))
        y = (squares * squares.sum([choice["over"]]).unsqueeze(-1)).flatten(2)
        y = (y.sin(), y.cos())[choice["which"]] * torch.tensor(choice["constant"])
        return x + self.scale * self.down(self.act(torch.tanh(y + choice["shift"].double()).float()))


def same(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> bool:
    return all(
        theirs is None if ours is None else theirs is not None and torch.equal(ours, theirs)
        for ours, theirs in zip(got, want, strict=True)
    )


def between(model: Stack, manager: Any, change: Callable[[Any], None], *, autocast: bool = False) -> list[Any]:
    """Gradients of a step in which something changes between forward and backward; twice with autocast, for its cache."""
    with manager, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(ids(0)) + model(ids(1))
    for layer in model.layers:
        change(layer)
    try:
        loss.backward()
    finally:
        Finds.elsewhere = False
    return gradients(model)
