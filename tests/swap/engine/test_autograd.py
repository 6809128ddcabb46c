"""Every odd path of autograd through the engine: what is saved comes back exact, or an error is raised."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Block, Stack, assert_equal, gradients, ids, plain, stack, train
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memo
from memo.errors import ModifiedAfterSave

if TYPE_CHECKING:
    from collections.abc import Callable


def test_retain_graph_gives_the_same_gradients_twice(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    with offload(model):
        loss = model(ids())
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(model), strict=True))
    reference = stack()
    reference(ids()).backward()
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(reference), strict=True))


def test_double_backward_gives_the_same_second_order_gradients(offload: Callable[..., memo.Manager]) -> None:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x))

    def second_order(manager: memo.Manager | None, model: Stack) -> list[torch.Tensor]:
        parameters = list(model.parameters())
        if manager is None:
            loss = model(ids())
        else:
            with manager:
                loss = model(ids())
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return list(torch.autograd.grad(sum((g * g).sum() for g in first), parameters))

    model = stack(make=Smooth)
    got = second_order(offload(model), model)
    want = second_order(None, stack(make=Smooth))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_tangents_of_forward_mode_are_not_lost(offload: Callable[..., memo.Manager], alpha: float) -> None:
    """A product with the Hessian, forward over reverse: backward asks for what was saved with its tangents."""

    def hessian_product(manager: Any, model: Stack) -> list[torch.Tensor]:
        parameters = dict(model.named_parameters())
        with forward_ad.dual_level(), manager:
            duals = {name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in parameters.items()}
            loss = functional_call(model, duals, (ids(),))
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            return [forward_ad.unpack_dual(gradient).tangent.clone() for gradient in gradients]

    model = stack(make=lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)))
    want = hessian_product(contextlib.nullcontext(), model)
    got = hessian_product(offload(model, alpha=alpha), model)
    assert all(map(torch.equal, got, want))


def test_forward_without_backward_frees_everything(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    manager = offload(model)
    for step in range(3):
        with manager:
            loss = model(ids(step))
        del loss
        gc.collect()
        assert manager.stats.live_entries == 0
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())


def test_eval_under_no_grad_saves_nothing_and_disturbs_nothing(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    manager = offload(model)
    with manager, torch.no_grad():
        model.eval()(ids(7))
    assert manager.stats.packed == 0
    model.train()
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_is_followed_by_a_normal_step(offload: Callable[..., memo.Manager], where: str) -> None:
    model = stack()
    manager = offload(model)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    if where == "forward":
        hook = model.layers[1].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError), manager:
            model(ids())
    else:
        hook = model.layers[1].norm1.weight.register_hook(fail)
        with manager:
            loss = model(ids())
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
    hook.remove()
    model.zero_grad()
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())


class ChangesItsInput(nn.Module):
    """Saves a tensor, then adds to it in place: stock autograd raises in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(self.linear(x))  # exp saves its output
        y.mul_(0.5)
        return x + y


@pytest.mark.parametrize("min_bytes", [512, "1GiB"], ids=["moved", "kept"])
def test_in_place_change_after_save_raises(offload: Callable[..., memo.Manager], min_bytes: Any) -> None:
    model = stack(make=ChangesItsInput)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(ids()).backward()
    manager = offload(model, min_bytes=min_bytes)
    with manager:
        loss = model(ids())
    with pytest.raises(ModifiedAfterSave, match=r"changed in place"):
        loss.backward()


def test_parameter_changed_between_forward_and_backward_raises(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    with offload(model):
        loss = model(ids())
    with torch.no_grad():
        model.layers[0].up.weight.add_(1.0)
    with pytest.raises(ModifiedAfterSave):
        loss.backward()


def test_gradient_accumulation_over_three_microbatches(offload: Callable[..., memo.Manager]) -> None:
    def accumulate(model: Stack, manager: Any) -> list[torch.Tensor | None]:
        for micro in range(3):
            with manager:
                loss = model(ids(micro)) / 3
            loss.backward()
        return gradients(model)

    model = stack()
    got, want = accumulate(model, offload(model)), accumulate(stack(), contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_their_backwards(offload: Callable[..., memo.Manager], order: tuple[int, ...]) -> None:
    def run(model: Stack, manager: Any) -> list[torch.Tensor | None]:
        for _ in range(2):  # the second round prefetches by the order observed in the first
            losses = []
            for micro in range(3):
                with manager:
                    losses.append(model(ids(micro)))
            for micro in order:
                losses[micro].backward()
        return gradients(model)

    model = stack()
    manager = offload(model)
    got, want = run(model, manager), run(stack(), contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_layers_are_replaced_or_stay(offload: Callable[..., memo.Manager], reentrant: bool) -> None:
    class Checkpointed(Stack):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return F.cross_entropy((self.norm(x) @ self.embed.weight.t()).flatten(0, 1), tokens.flatten())

    def make() -> Checkpointed:
        torch.manual_seed(0)
        return Checkpointed()

    model = make()
    manager = offload(model)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, plain(make))
    assert manager.report().replaced == (0 if reentrant else len(manager.layers))
    # The inputs of checkpoints that stay: two a step are saved before another layer follows.
    assert (manager.stats.bytes_disk <= 3 * 3 * (2 * 48 * 32 * 4)) == reentrant


def test_a_users_own_hooks_inside_win(offload: Callable[..., memo.Manager]) -> None:
    class Own(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    def make() -> Stack:
        return stack(make=lambda: Own(32, 2))

    model = make()
    manager = offload(model)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(make))
    assert manager.stats.bytes_disk == 0


def test_a_custom_function_may_ask_for_its_tensors_twice(offload: Callable[..., memo.Manager]) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, _ = ctx.saved_tensors
            _, y = ctx.saved_tensors
            return grad * y, grad * x

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + Twice.apply(self.linear(x), x)

    model = stack(make=Layer)
    got = train(model, lambda step: model(ids(step)), offload(model))
    assert_equal(got, plain(lambda: stack(make=Layer)))
