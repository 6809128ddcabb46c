"""What begins after a layer's first call is found at its 2nd, 10th, 100th call, at larger sizes, or at once by `verify`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import gradients
from torch import nn
from torch.nn import functional as F

import memo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIDDEN = 16


class Late:
    """Something that begins in a later step, in the run with memo and in the one without."""

    begun = False


@pytest.fixture(autouse=True)
def _not_begun_after() -> Iterator[None]:
    yield
    Late.begun = False


def overwrites(x: torch.Tensor) -> torch.Tensor:
    """Writes through NumPy into what an operator made."""
    seen = x.detach().numpy()
    if Late.begun:
        seen[..., 0] = 3.0
    return x


@memo.token_local
def factor(x: torch.Tensor) -> torch.Tensor:
    """Another one in a replay, once it has begun."""
    return x.detach() * (2.0 if Late.begun and not torch.is_grad_enabled() else 1.0)


@memo.token_local
def factor_of_many(x: torch.Tensor) -> torch.Tensor:
    """Another one in a replay with many rows."""
    return x.detach() * (2.0 if x.shape[1] > 8 and not torch.is_grad_enabled() else 1.0)


def drifts(x: torch.Tensor) -> torch.Tensor:
    return x * factor(x)


def drifts_where_large(x: torch.Tensor) -> torch.Tensor:
    return x * factor_of_many(x)


class Layer(nn.Module):
    def __init__(self, strange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.strange = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN), strange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.strange(self.up(x))).square())  # type: ignore[no-any-return]


def made(strange: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(strange) for _ in range(2)])


def step(model: nn.Module, manager: memo.Manager | None, rows: int) -> list[Any]:
    x = torch.randn(2, rows, HIDDEN, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    if manager is None:
        loss = model(x).square().mean()
    else:
        with manager:
            loss = model(x).square().mean()
    loss.backward()
    return [loss, *gradients(model)]


def runs(
    strange: Callable[[torch.Tensor], torch.Tensor],
    *,
    steps: int,
    begins: int = 0,
    rows: Callable[[int], int] = lambda number: 8,
    **options: Any,
) -> tuple[list[int], dict[int, str], list[int]]:
    """Steps, from 1, with other gradients than without memo; warnings by step; and trials so far after each step."""
    plain, ours = made(strange), made(strange)
    manager = memo.offload(ours, layers=list(ours), host="8MiB", min_bytes=0, alpha=0.0, **options)
    wrong, told, trials = [], {}, []
    for number in range(1, steps + 1):
        Late.begun = 0 < begins <= number
        want = step(plain, None, rows(number))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = step(ours, manager, rows(number))
        told |= {number: str(caught[0].message)} if caught else {}
        if not all(map(torch.equal, want[1:], got[1:])):
            wrong.append(number)
        use = manager.report().tokenwise
        assert use is not None
        trials.append(use.trials)
    manager.close()
    return wrong, told, trials


def test_recomputes_are_tried_again_at_the_second_tenth_and_hundredth_call() -> None:
    wrong, told, trials = runs(lambda x: x, steps=101)
    assert (wrong, told) == ([], {})
    each = trials[0]
    at = [number for number, (before, after) in enumerate(zip([0, *trials], trials, strict=False), 1) if after > before]
    assert at == [1, 2, 10, 100]
    assert trials[-1] == 4 * each


@pytest.mark.parametrize("strange", [overwrites, drifts], ids=["overwrites", "drifts"])
def test_what_begins_late_is_told_at_the_tenth_call_and_right_from_then_on(strange: Any) -> None:
    wrong, told, _ = runs(strange, steps=12, begins=3)
    assert wrong == [3, 4, 5, 6, 7, 8, 9]
    assert list(told) == [10]
    assert "Gradients of this layer's 7 calls before this one may be wrong" in told[10]


@pytest.mark.parametrize("strange", [overwrites, drifts], ids=["overwrites", "drifts"])
def test_verify_finds_what_begins_late_in_the_call_in_which_it_begins(strange: Any) -> None:
    assert runs(strange, steps=6, begins=3, verify=True)[:2] == ([], {})


@pytest.mark.parametrize("strange", [overwrites, drifts], ids=["overwrites", "drifts"])
def test_what_begins_in_the_second_call_is_found_there(strange: Any) -> None:
    assert runs(strange, steps=4, begins=2)[:2] == ([], {})


def test_a_recompute_is_tried_again_at_larger_sizes() -> None:
    assert runs(drifts_where_large, steps=8, rows=lambda number: 8 if number < 5 else 64)[:2] == ([], {})
