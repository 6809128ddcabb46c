"""Dispatch modes of the program that draw random numbers: what memo runs under them moves no generator."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from small_models import Block
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memo


class Draws(TorchDispatchMode):
    """Draws at each operator but `detach`, which torch itself shows at other saves where there are hooks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            torch.rand(())
        return func(*args, **kwargs or {})


def steps(alpha: float | None, around: str) -> list[torch.Tensor]:
    """Loss, gradients and the generator's state of three steps that draw their input and a dropout."""
    torch.manual_seed(0)
    model, found = nn.Sequential(*(Block(32, 2) for _ in range(3))), []
    manager = None if alpha is None else memo.offload(model, layers=[*model], alpha=alpha, host="4MiB", min_bytes=1)
    for _ in range(3):
        model.zero_grad()
        with Draws() if around == "step" else contextlib.nullcontext():
            with manager or contextlib.nullcontext(), Draws() if around == "forward" else contextlib.nullcontext():
                loss = nn.functional.dropout(model(torch.randn(2, 64, 32)), 0.1).sum()
            loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters()), torch.get_rng_state()]  # type: ignore[union-attr]
    if manager is not None:
        assert (manager.stats.bytes_recomputed > 0) == (alpha != 1)
        manager.close()
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("around", ["forward", "step"])
def test_a_mode_that_draws_draws_as_without_memo(around: str, alpha: float) -> None:
    assert all(map(torch.equal, steps(alpha, around), steps(None, around)))
