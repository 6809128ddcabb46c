"""Attached twice, attached and entered, two managers, nested models, threads: each works, or is refused in one line."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from small_models import Stack, assert_equal, ids, plain, stack, train
from torch import nn

import memo
from memo.errors import UsageError

ALPHAS = [1.0, 0.0]


def offload(model: nn.Module, alpha: float = 1.0, **options: Any) -> memo.Manager:
    return memo.offload(model, alpha=alpha, host="8MiB", min_bytes=512, **options)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("alpha", ALPHAS)
def test_attached_twice_and_entered_is_managed_once(alpha: float) -> None:
    model = stack()
    manager = offload(model, alpha).attach()
    before = hooks_of(model)
    assert manager.attach() is manager
    assert hooks_of(model) == before
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    packed = manager.stats.packed
    train(model, lambda step: model(ids(step)))
    assert manager.stats.packed > 1.9 * packed
    manager.detach()
    assert hooks_of(model) == 0
    manager.detach()
    manager.close()


def test_a_later_manager_takes_the_place_of_an_attached_one() -> None:
    model = stack()
    first = offload(model).attach()
    second = offload(model, 0.0).attach()
    assert_equal(train(model, lambda step: model(ids(step))), plain())
    assert (first.stats.packed, second.stats.packed > 0) == (0, True)
    second.close()
    assert hooks_of(model) == 0
    first.close()


def test_a_manager_of_a_part_does_not_take_the_whole_ones_place() -> None:
    model = stack()
    whole = offload(model).attach()
    part = offload(model, layers=list(model.layers)[:2])
    with pytest.raises(UsageError, match="a manager of these and of more layers is attached; detach that one first"):
        part.attach()
    whole.detach()
    part.attach()
    assert_equal(train(model, lambda step: model(ids(step))), plain())
    part.close()
    whole.close()


def test_two_managers_at_once_are_refused() -> None:
    model = stack()
    first, second = offload(model).attach(), offload(model)
    with second, pytest.raises(UsageError, match=r"layers\.0 is in another manager's care here"):
        model(ids())
    with first, pytest.raises(UsageError, match=r"layers\.0 is in another manager's care here"), second:
        model(ids())
    assert_equal(train(model, lambda step: model(ids(step))), plain())
    first.close()
    second.close()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_parts_of_a_model_have_managers_of_their_own(alpha: float) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = Stack(), Stack()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.one(ids) * self.two(ids)

    def run(managed: str) -> list[Any]:
        model = Pair()
        wanted = {"one": model.one, "two": model.two, "both": model}
        managers = [offload(wanted[name], alpha).attach() for name in managed.split()]
        steps = train(model, lambda step: model(ids(step)))
        for manager in managers:
            assert manager.stats.packed > 0
            manager.close()
        assert hooks_of(model) == 0
        return steps

    want = run("")
    for managed in ("one", "one two", "both"):
        assert_equal(run(managed), want)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_within_another_manager_a_part_of_its_own_works_beside_its_layers_and_not_inside_them(alpha: float) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = Stack()
            self.outer = Stack()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids) * self.outer(ids)

    model, reference = Outer(), Outer()
    whole, part = offload(model, alpha, layers=model.outer.layers).attach(), offload(model.inner, alpha).attach()
    assert_equal(train(model, lambda step: model(ids(step))), train(reference, lambda step: reference(ids(step))))
    assert whole.stats.packed > 0
    assert part.stats.packed > 0
    model.outer.layers[1].norm1.register_forward_pre_hook(lambda module, args: (args[0] * model.inner(ids()),))
    with pytest.raises(UsageError, match=r"runs inside outer\.layers\.1, a layer of another manager; let one manager"):
        model(ids())
    part.close()
    whole.close()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_second_thread_is_refused_and_harms_nothing(alpha: float) -> None:
    """As torch's DataParallel runs a model: several threads at once."""
    model = stack()
    manager = offload(model, alpha).attach()
    within, done = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def other() -> None:
        within.wait(20)
        try:
            with torch.no_grad():
                model(ids(1))  # an evaluation is left alone
            model(ids(1))
        except UsageError as error:
            errors.append(error)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    main = threading.get_ident()

    def wait(*args: object) -> None:
        if threading.get_ident() == main:
            within.set()
            assert done.wait(20)

    hook = model.layers[1].norm2.register_forward_pre_hook(wait)  # type: ignore[union-attr]
    loss = model(ids())
    hook.remove()
    thread.join()
    loss.backward()
    reference = stack()
    reference(ids()).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert len(errors) == 1
    assert "entered in another thread" in str(errors[0])
    model(ids()).backward()  # and from yet another thread, when no forward is under way
    later = threading.Thread(target=lambda: model(ids()).backward())
    packed = manager.stats.packed
    later.start()
    later.join()
    assert manager.stats.packed > packed
    manager.close()


def test_detach_inside_a_forward_is_refused() -> None:
    model = stack()
    manager = offload(model).attach()
    hook = model.layers[0].register_forward_hook(lambda *args: manager.detach())
    with pytest.raises(UsageError, match="detach between forwards"):
        model(ids())
    hook.remove()
    model(ids()).backward()
    manager.close()


def test_a_model_without_a_forward_around_its_layers_and_a_closed_manager_are_refused() -> None:
    model = stack()
    own = offload(model.layers[0], layers=[model.layers[0]])
    for manager in (own, offload(model.layers, layers=model.layers)):
        with pytest.raises(UsageError, match="the model has no forward around its layers; use `with manager:`"):
            manager.attach()
        manager.close()
    with pytest.raises(UsageError, match="this manager is closed"):
        own.attach()
