"""Backward without a managed forward is said once: `memo.offload(model)` alone does nothing, and would do so silently."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
from small_models import ids, stack
from torch import nn

import memo

ONCE = r"backward ran, and no forward of Stack was managed.*attach\(\) once, or run each forward inside `with manager:`"


def offload(model: nn.Module, **options: Any) -> memo.Manager:
    return memo.offload(model, alpha=1.0, host="8MiB", min_bytes=512, **options)


def test_offload_alone_is_said_once() -> None:
    model = stack()
    manager = offload(model)
    with pytest.warns(RuntimeWarning, match=ONCE) as told:
        [model(ids()).backward() for _ in range(3)]
    assert len(told) == 1
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    manager.close()


def test_it_is_said_where_the_manager_was_not_even_kept() -> None:
    model = stack()
    offload(model)
    gc.collect()
    with pytest.warns(RuntimeWarning, match=ONCE):
        model(ids()).backward()


def test_an_attached_manager_whose_model_is_not_called_says_what_to_do() -> None:
    model = stack()
    manager = offload(model).attach()
    with pytest.warns(
        RuntimeWarning, match="it is attached, but neither the model nor a part around its layers was called"
    ):
        model.forward(ids()).backward()
    manager.close()


def test_nothing_is_said_after_a_managed_forward_nor_by_evaluation_nor_by_a_copy() -> None:
    model = stack()
    manager = offload(model)
    copy.deepcopy(model)(ids()).backward()
    with torch.no_grad():
        model(ids())
    torch.save(model, io.BytesIO())
    with manager:
        loss = model(ids())
    loss.backward()
    model(ids()).backward()
    manager.close()


def test_a_later_manager_or_the_end_of_this_one_ends_the_watch() -> None:
    model = stack()
    first = offload(model)
    with offload(model) as second:
        loss = model(ids())
    loss.backward()
    second.close()
    first.close()
    offload(model).close()
    model(ids()).backward()


def test_neither_model_nor_manager_is_kept() -> None:
    model = stack()
    manager = offload(model)
    known = weakref.ref(model), weakref.ref(manager)
    del model, manager
    gc.collect()
    assert [one() for one in known] == [None, None]


def test_a_frozen_stack_is_watched_by_what_is_trained() -> None:
    model = stack()
    model.layers.requires_grad_(requires_grad=False)
    manager = offload(model)
    with pytest.warns(RuntimeWarning, match="no forward of Stack"):
        model(ids()).backward()
    manager.close()
    model.requires_grad_(requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offload(model).close()
