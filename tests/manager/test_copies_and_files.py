"""Whole modules that are copied or saved while they are managed have nothing of memo's, and the original stays managed."""

from __future__ import annotations

import contextlib
import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import memo

LOAD = """
import sys
sys.modules["memo"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
model(torch.ones(2, 8, 16)).sum().backward()
torch.save([parameter.grad for parameter in model.parameters()], sys.argv[2])
"""


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def run(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 8, 16)).sum()
    return loss


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    run(model).backward()
    return [parameter.grad for parameter in model.parameters()]


def equal(got: list[torch.Tensor | None]) -> bool:
    want = gradients(encoder())
    return len(got) == len(want) and all(
        a is not None and b is not None and torch.equal(a, b) for a, b in zip(got, want, strict=True)
    )


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(table) for module in model.modules() for name, table in vars(module).items() if name.startswith("_forward_")
    )


@contextlib.contextmanager
def attached(model: nn.Module, manager: memo.Manager) -> Iterator[None]:
    manager.attach()
    yield


@contextlib.contextmanager
def entered(model: nn.Module, manager: memo.Manager) -> Iterator[None]:
    with manager:
        yield


@contextlib.contextmanager
def entered_after_a_forward(model: nn.Module, manager: memo.Manager) -> Iterator[None]:
    with manager:
        run(model)
        yield


WHEN = pytest.mark.parametrize("when", [attached, entered, entered_after_a_forward])
ALPHA = pytest.mark.parametrize("alpha", [1.0, 0.0])
_When = Callable[[nn.Module, memo.Manager], contextlib.AbstractContextManager[None]]


def offload(model: nn.Module, alpha: float) -> memo.Manager:
    return memo.offload(model, alpha=alpha, host="8MiB", min_bytes=512)


@WHEN
def test_a_file_of_a_managed_model_loads_where_memo_is_not_installed(when: _When, tmp_path: Path) -> None:
    model = encoder()
    manager = offload(model, 1.0)
    with when(model, manager):
        torch.save(model, tmp_path / "model.pt")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt"), str(tmp_path / "gradients.pt")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert equal(torch.load(tmp_path / "gradients.pt", weights_only=True))
    manager.close()


@pytest.mark.covering(1)
@WHEN
@ALPHA
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: torch.optim.swa_utils.AveragedModel(model).module])
def test_a_deep_copy_trains_without_memo_and_the_original_with_it(
    copied: Callable[[nn.Module], nn.Module], alpha: float, when: _When
) -> None:
    model = encoder()
    manager = offload(model, alpha)
    with when(model, manager):
        other = copied(model)
        assert hooks_of(other) == 0
        packed = manager.stats.packed
        assert equal(gradients(other))
        assert manager.stats.packed == packed
        assert all(parameter.grad is None for parameter in model.parameters())
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert equal(gradients(model))
        assert manager.stats.packed > packed
    manager.close()
    assert hooks_of(model) == 0


def test_a_copy_made_within_a_layer_has_no_hook() -> None:
    model, copies = encoder(), []
    manager = offload(model, 0.0)
    inside = model.layers[1].linear1.register_forward_hook(lambda *_: copies.append(copy.deepcopy(model)))
    with manager:
        loss = run(model)
    inside.remove()
    loss.backward()
    assert equal([parameter.grad for parameter in model.parameters()])
    copies[0].layers[1].linear1._forward_hooks.clear()  # the program's own
    assert hooks_of(copies[0]) == 0
    assert equal(gradients(copies[0]))
    manager.close()


def test_hooks_of_the_program_and_a_state_of_its_own_are_in_the_copy() -> None:
    class Own(nn.TransformerEncoder):
        def __getstate__(self) -> dict[str, object]:
            return {**vars(self), "saved": True}

    model = encoder()
    model.__class__ = Own
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(1))
    manager = offload(model, 1.0).attach()
    other = copy.deepcopy(model)
    assert other.saved is True
    run(other)
    assert len(seen) == 1
    manager.close()


def test_a_class_that_copies_its_hooks_itself_has_one_that_does_nothing() -> None:
    class Own(nn.TransformerEncoder):
        def __deepcopy__(self, known: dict[int, object]) -> nn.Module:
            other = encoder()
            other._forward_hooks = copy.deepcopy(self._forward_hooks, known)
            other._forward_hooks_always_called = self._forward_hooks_always_called
            return other

    model = encoder()
    model.__class__ = Own
    manager = offload(model, 1.0).attach()
    assert equal(gradients(copy.deepcopy(model)))
    assert manager.stats.packed == 0
    manager.close()


def test_a_class_is_freed_after_its_managed_models() -> None:
    class Layer(nn.Linear):
        pass

    model = nn.Sequential(Layer(4, 4), Layer(4, 4))
    manager = memo.offload(model, layers=list(model), alpha=0.0, host="1MiB", min_bytes=0)
    with manager:
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    manager.attach()
    model(torch.ones(2, 4)).sum().backward()
    manager.close()
    kind = weakref.ref(Layer)
    del model, manager, loss, Layer
    gc.collect()
    assert kind() is None


def test_a_shallow_copy_has_the_hooks_of_a_model_that_was_managed() -> None:
    model = encoder()
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    manager = offload(model, 0.0)
    with manager:
        run(model).backward()
    manager.close()
    copied = copy.copy(model)
    assert copied._forward_hooks is model._forward_hooks
    run(copied)
    assert len(called) == 2
