"""A model that calls `layer.forward(x)`: hooks never run, and the user is told so once; nobody else is."""

from __future__ import annotations

import _thread
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import SqueezeBertConfig, SqueezeBertForMaskedLM

import memo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(x))


class Model(nn.Module):
    """Runs each layer as `call` says."""

    def __init__(self, call: Callable[[nn.Module, int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position, layer in enumerate(self.layers):
            x = self.call(layer, position, x)
        return x.pow(2).sum()


def run(model: Model, steps: int = 1) -> list[str]:
    """Warnings of some steps."""
    manager = memo.offload(model, alpha=0.0, host="1MiB", min_bytes=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            with manager:
                loss = model(torch.ones(4, 8, requires_grad=True))
            loss.backward()
    manager.close()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_layers_that_run_without_hooks_are_said_once() -> None:
    (told,) = run(Model(lambda layer, at, x: layer.forward(x)), steps=5)
    assert told.startswith("layers.0 and 2 more ran without hooks, and nothing of it is managed")


def test_one_such_layer_among_others_is_named() -> None:
    (told,) = run(Model(lambda layer, at, x: layer.forward(x) if at == 1 else layer(x)), steps=2)
    assert told.startswith("layers.1 ran without hooks")


# A cast of a frozen parameter has no trace of it, and is not known again.
@pytest.mark.parametrize(("frozen", "autocast"), [(True, False), (False, True)])
def test_frozen_and_cast_parameters_are_known_again(*, frozen: bool, autocast: bool) -> None:
    model = Model(lambda layer, at, x: layer.forward(x) if at == 2 else layer(x))
    model.layers[2].requires_grad_(requires_grad=not frozen)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (told,) = run(model)
    assert told.startswith("layers.2 ran")


def test_a_layer_that_is_skipped_is_no_such_layer() -> None:
    assert run(Model(lambda layer, at, x: x if at == 1 else layer(x)), steps=4) == []


def test_a_layer_whose_weight_another_one_uses_is_no_such_layer() -> None:
    model = Model(lambda layer, at, x: x if at == 1 else layer(x))
    model.layers[1].inner.weight = model.layers[0].inner.weight  # type: ignore[union-attr]
    assert run(model, steps=4) == []


def test_nothing_is_said_where_nothing_is_saved() -> None:
    with torch.no_grad():
        model = Model(lambda layer, at, x: layer.forward(x))
        manager = memo.offload(model, alpha=0.0, host="1MiB", min_bytes=1)
        with manager:
            model(torch.ones(4, 8))
    manager.close()


def test_squeezebert_is_one_of_them() -> None:
    config = SqueezeBertConfig(
        vocab_size=61,
        hidden_size=32,
        embedding_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = SqueezeBertForMaskedLM(config)
    manager = memo.offload(model, alpha=0.0, host="1MiB", min_bytes=1)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    with pytest.warns(RuntimeWarning, match=r"encoder.layers.0 and 1 more ran without hooks"), manager:
        loss = model(ids, labels=ids).loss
    loss.backward()
    manager.close()


def test_a_tensor_is_saved_where_nothing_of_python_is_below_as_in_threads_of_autograd_on_a_device() -> None:
    """The walk up the stack once failed there: a derivative of a derivative on a GPU was an AttributeError."""
    saved: list[object] = []
    with memo.offload(Model(lambda layer, at, x: layer(x)), alpha=0.0, host="1MiB", min_bytes=1):
        pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)
        _thread.start_new_thread(saved.extend, (map(pack, [torch.ones(2)]),))
        until = time.monotonic() + 60
        while not saved and time.monotonic() < until:
            time.sleep(0.01)
    assert len(saved) == 1
