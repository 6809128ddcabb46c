"""A choice between two corners of a curve: what the next call is held for is what the next call keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Step, assert_equal, ids, stack, train
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    import memo

HIDDEN, CHUNK, SEQ = 32, 8, 16


class Decays(nn.Module):
    """A recurrence's decays in chunks: large results, made of running sums that no graph needs, and states after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chunks = self.gate(self.norm(x)).unflatten(1, (-1, CHUNK))
        sums = nn.functional.logsigmoid(chunks).cumsum(2)
        decays = (sums.unsqueeze(3) - sums.unsqueeze(2)).tanh()
        mixed = (decays * chunks.unsqueeze(2)).sum(3)
        state, parts = torch.zeros_like(mixed[:, 0].mT @ mixed[:, 0]), []
        for number in range(chunks.size(1)):
            part = (mixed[:, number] * sums[:, number].exp()).tanh()
            parts.append(part @ state.sigmoid() + part.exp())
            state = 0.1 * state * sums[:, number, -1].exp().unsqueeze(-1) + part.mT @ mixed[:, number].sin()
        return x + self.out(torch.cat(parts, 1))  # type: ignore[no-any-return]


def make() -> nn.Module:
    return stack(layers=2, make=Decays)


def trained(model: nn.Module, manager: memo.Manager | None = None, steps: int = 3) -> list[Step]:
    return train(model, lambda step: model(ids(step, seq=SEQ)), manager, steps=steps)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, (0.2, 0.3, 0.5)], ids=str)
def test_a_call_keeps_what_it_was_held_for(offload: Callable[..., memo.Manager], alpha: Any) -> None:
    """Not what follows from a target by what this call happens to have: at alpha 0 it could keep less."""
    model = make()
    manager = offload(model, alpha=alpha, min_bytes=1)
    assert_equal(trained(model, manager), trained(make()))
    told = manager.explain(0)
    assert told.used.name != "now"
    least = next(point for point in told.points if point.name == "attention")
    if isinstance(alpha, float):
        assert told.used.kept_nbytes <= alpha * told.saved_nbytes + (1 - alpha) * least.kept_nbytes
