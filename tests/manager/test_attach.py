"""`Manager.attach`: every training forward is managed without a `with`, others are left alone, and gradients are equal."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
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


def test_what_torch_func_transforms_is_left_alone() -> None:
    model, reference = stack(), stack()
    manager = attached(model, alpha=0.0)

    def gradients(of: nn.Module) -> dict[str, torch.Tensor]:
        given = {name: parameter.detach() for name, parameter in of.named_parameters()}
        found: dict[str, torch.Tensor] = torch.func.grad(lambda one: torch.func.functional_call(of, one, (ids(),)))(
            given
        )
        return found

    got, want = gradients(model), gradients(reference)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert manager.stats.packed == 0
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


def test_a_forward_that_raises_ends_its_management() -> None:
    model = stack()
    manager = attached(model, alpha=0.0)
    before = hooks_of(model)
    with pytest.raises(IndexError, match="out of range"):
        model(torch.full((1, 8), 10**6))
    assert hooks_of(model) == before
    manager.detach()
    assert hooks_of(model) == 0
    manager.close()


def test_a_copy_of_an_attached_model_is_not_attached() -> None:
    model = stack()
    manager = attached(model, alpha=1.0)
    other: Stack = copy.deepcopy(model)
    assert_equal(train(other, lambda step: other(ids(step))), plain())
    assert manager.stats.packed == 0
    manager.close()


# Programs that are run as they are and attached; each returns what it computes.


def accumulates(model: Stack) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = []
    for step in range(3):
        for micro in range(3):
            loss = model(ids(3 * step + micro)) / 3
            loss.backward()
            found.append(loss.detach())
        found += gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return found


def raises_in_a_layer(model: Stack) -> list[torch.Tensor]:
    def fail(*args: object) -> None:
        raise ValueError("meant")

    model(ids()).backward()
    for position, register in ((1, "register_forward_pre_hook"), (2, "register_forward_hook")):
        hook = getattr(model.layers[position], register)(fail)
        with pytest.raises(ValueError, match="meant"):
            model(ids(position))
        hook.remove()
        model(ids(3 + position)).backward()
    return gradients_of(model)


def is_interrupted(model: Stack) -> list[torch.Tensor]:
    """Ctrl-C in a forward: no hook of torch's is called."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        hook = model.layers[1].norm2.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids(1))
        hook.remove()
        model(ids(2)).backward()
    return gradients_of(model)


def runs_two_forwards_before_a_backward(model: Stack) -> list[torch.Tensor]:
    for step in range(2):
        first, second = model(ids(2 * step)), model(ids(2 * step + 1))
        (first * second).backward()
    first, second = model(ids(5)), model(ids(6))
    first.backward()
    second.backward()
    return gradients_of(model)


def retains_the_graph(model: Stack) -> list[torch.Tensor]:
    loss = model(ids())
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    found = list(torch.autograd.grad(loss, list(model.parameters()), create_graph=False))
    return found + gradients_of(model)


def differentiates_twice(model: Stack) -> list[torch.Tensor]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(ids())
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(grad.pow(2).sum() for grad in first).backward()  # type: ignore[union-attr]
    return gradients_of(model)


def drops_a_loss(model: Stack) -> list[torch.Tensor]:
    model(ids()).backward()
    loss = model(ids(1))
    del loss
    model(ids(2))
    model(ids(3)).backward()
    return gradients_of(model)


def evaluates_in_between(model: Stack) -> list[torch.Tensor]:
    loss = model(ids())
    model.eval()
    with torch.no_grad():
        other = model(ids(1))
    model.train()
    kept = model(ids(2))  # its backward never comes
    loss.backward()
    return [other, kept.detach(), *gradients_of(model)]


def checkpoints_all(model: Stack) -> list[torch.Tensor]:
    for reentrant in (False, True):
        embedded = torch.zeros(1, requires_grad=True)
        loss = torch.utils.checkpoint.checkpoint(lambda x: model(ids()) + x, embedded, use_reentrant=reentrant)
        assert loss is not None
        loss.backward()
    return gradients_of(model)


def calls_functionally(model: Stack) -> list[torch.Tensor]:
    others = {name: (2 * value.detach()).requires_grad_() for name, value in model.named_parameters()}
    torch.func.functional_call(model, others, (ids(),)).backward()
    model(ids(1)).backward()
    return [value.grad for value in others.values() if value.grad is not None] + gradients_of(model)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


PROGRAMS = [
    accumulates,
    raises_in_a_layer,
    is_interrupted,
    runs_two_forwards_before_a_backward,
    retains_the_graph,
    differentiates_twice,
    drops_a_loss,
    evaluates_in_between,
    checkpoints_all,
    calls_functionally,
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_compute_the_same(
    program: Callable[[Stack], list[torch.Tensor]], alpha: float, *, within: bool
) -> None:
    model, reference = stack(), stack()
    manager = attached(model, alpha=alpha)
    with manager if within else contextlib.nullcontext():
        got = program(model)
    want = program(reference)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert manager.stats.packed > 0
    manager.detach()
    assert hooks_of(model) == 0
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()
