"""`Manager.attach`: every training forward is managed without a `with`, others are left alone, and gradients are equal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import Stack, assert_equal, ids, plain, stack, train
from torch import nn

import memo

ALPHAS = [1.0, 0.0]


def attached(model: nn.Module, **options: Any) -> memo.Manager:
    return memo.offload(model, **{"host": "8MiB", "min_bytes": 512, **options}).attach()


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("alpha", ALPHAS)
def test_training_forwards_are_managed_bit_for_bit(alpha: float) -> None:
    model = stack()
    manager = attached(model, alpha=alpha)
    assert_equal(train(model, lambda step: model(ids(step))), plain())
    assert manager.stats.bytes_host > 0
    assert (manager.stats.bytes_recomputed > 0) == (alpha == 0.0)
    manager.close()


def test_detach_leaves_no_hook() -> None:
    model = stack()
    manager = attached(model, alpha=1.0)
    assert hooks_of(model) > 0
    loss = model(ids())
    manager.detach()
    assert hooks_of(model) == 0
    loss.backward()  # what is saved comes back all the same
    packed = manager.stats.packed
    model(ids()).backward()
    assert manager.stats.packed == packed
    manager.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_are_left_alone(mode: Any) -> None:
    model = stack()
    manager = attached(model, alpha=1.0)
    seen: list[int] = []
    model.layers[0].register_forward_hook(lambda module, args, output: seen.append(hooks_of(model)))
    with mode():
        model(ids())
    model(ids())
    assert seen[0] < seen[1]
    manager.close()


def test_a_part_of_the_model_that_is_called_itself_is_managed() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack()

        def training_step(self, step: int) -> torch.Tensor:
            loss: torch.Tensor = self.inner(ids(step))
            return loss

    model = Outer()
    manager = attached(model, alpha=0.0)
    assert_equal(train(model, model.training_step), plain())
    assert manager.stats.bytes_recomputed > 0
    manager.close()


def test_a_copy_of_an_attached_model_is_not_attached() -> None:
    model = stack()
    manager = attached(model, alpha=1.0)
    other: Stack = copy.deepcopy(model)
    assert_equal(train(other, lambda step: other(ids(step))), plain())
    assert manager.stats.packed == 0
    manager.close()
