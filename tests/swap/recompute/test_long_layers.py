"""Layers of very many operators, as loops over time: planning takes a time in proportion to them, and past a bound none."""

from __future__ import annotations

import cProfile
import pstats
import warnings

import pytest
import torch
from torch import nn

import memo
from memo.errors import UsageError
from memo.swap.recompute import policy

WIDTH = 8


class Loop(nn.Module):
    """A recurrent layer, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], WIDTH)
        states = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        return torch.stack(states, 1)


class Recurrent(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Loop() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def built() -> Recurrent:
    torch.manual_seed(0)
    return Recurrent()


def given(length: int) -> torch.Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def plain(length: int) -> list[torch.Tensor]:
    model = built()
    model(given(length)).backward()
    return gradients(model)


def managed(alpha: float | None, length: int, *, steps: int) -> memo.Manager:
    """The manager of a few steps, each of whose gradients were compared."""
    model = built()
    manager = memo.offload(model, alpha=alpha, host="64MiB", min_bytes=0)
    for _ in range(steps):
        with manager:
            loss = model(given(length))
        loss.backward()
        assert all(map(torch.equal, gradients(model), plain(length)))
    return manager


@pytest.mark.parametrize("alpha", [0.0, 0.5, None])
def test_planning_calls_as_many_functions_as_there_are_operators(alpha: float | None) -> None:
    """Counted and not timed, so that it is the same on every machine. Twice the operators, twice the calls."""
    calls = []
    for length in (48, 96):
        profile = cProfile.Profile()
        profile.enable()
        managed(alpha, length, steps=1).close()
        profile.disable()
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert calls[1] < 2.2 * calls[0]


@pytest.mark.parametrize("alpha", [0.0, None])
def test_a_layer_of_more_operators_than_are_planned_moves_whole(
    alpha: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "MOST_OPERATORS", 50)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        manager = managed(alpha, 24, steps=2)
    reason = "its forward runs more than 50 operators, too many to plan a recompute of"
    assert [str(one.message) for one in told if "operators" in str(one.message)] == [
        f"layers.0 moves whole tensors: {reason}"
    ]
    assert reason in str(manager.report())
    assert manager.stats.bytes_recomputed == 0
    with pytest.raises(UsageError, match="it moves whole tensors"):
        manager.explain(0)
    manager.close()
