"""Plans carried over to calls of other sizes: the same bits, without a search for each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_equal, train
from torch import nn
from torch.nn import functional as F

import memo
from memo.swap.recompute.plans import Plans

HIDDEN, WIDE, TOKENS = 32, 80, 48
STEPS = 10
ROWS = [70, 64, 77, 69, 73, 66, 75, 71, 68, 74]
"""Rows of the wide part in each step; saved bytes differ by less than a fifth."""


class Routed(nn.Module):
    """A dense MLP, then one over rows of the tokens, of which there are others in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.rows = TOKENS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.norms[0](x))))
        tokens = self.norms[1](x).flatten(0, 1)
        picked = torch.arange(self.rows) % len(tokens)
        inner = F.silu(self.wide(tokens[picked]))
        outer = self.narrow(inner)[torch.arange(len(tokens)) % self.rows]
        return x + outer.view_as(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Routed() for _ in range(3)])

    def run(self, step: int, rows: list[int]) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            layer.rows = rows[step] + number  # type: ignore[assignment]
        return self(torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step)))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(
    monkeypatch: pytest.MonkeyPatch, scratch: Path, alpha: float, rows: list[int]
) -> tuple[memo.Manager, list[str]]:
    """The manager after all steps, which gave the bits of those without it, and the layers of the searches for a plan."""
    searched: list[str] = []
    made = Plans._made

    def noted(self: Plans, case: Any, shared: Any) -> Any:
        searched.append(case.layer)
        return made(self, case, shared)

    monkeypatch.setattr(Plans, "_made", noted)
    torch.manual_seed(0)
    model, reference = Model(), Model()
    reference.load_state_dict(model.state_dict())
    manager = memo.offload(model, alpha=alpha, disk=scratch, min_bytes=256)
    got = train(model, lambda step: model.run(step, rows), manager, steps=len(rows))
    assert_equal(got, train(reference, lambda step: reference.run(step, rows), steps=len(rows)))
    return manager, searched


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7])
def test_ever_other_numbers_of_rows_are_planned_a_few_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alpha: float
) -> None:
    manager, searched = trained(monkeypatch, tmp_path, alpha, ROWS)
    assert manager.stats.bytes_recomputed > 0
    layers = len(manager.layers)
    assert len(searched) <= 4 * layers, (
        "of ten calls each: the first, the next ones, which hold more, another class of size"
    )
    plans = manager._recompute_policy._plans
    assert len(plans._found) == len(searched), "calls that a plan was carried over to are not remembered"
    for layer in manager.layers:
        told = manager.explain(layer.name)
        assert {row.shape[0] for row in told.rows if row.operator == "aten.silu"} == {ROWS[-1] + int(layer.name[-1])}, (
            "explained with the sizes of its own call"
        )
    manager.close()


def test_many_more_rows_are_planned_for_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [20, 20, 20, 90, 21, 90, 19, 91]
    manager, searched = trained(monkeypatch, tmp_path, 0.3, rows)
    by_step = len(manager.layers)
    assert by_step < len(searched) <= 5 * by_step
    manager.close()


def test_a_call_with_so_few_rows_that_they_never_move_is_equal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manager, _ = trained(monkeypatch, tmp_path, 0.3, [40, 41, 3, 42, 1, 43])
    assert manager.stats.live_entries == 0
    manager.close()
