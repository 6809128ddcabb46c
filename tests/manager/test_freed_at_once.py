"""A model that was managed is gone with its last reference, closed or not: programs run with Python's collector off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from small_models import ids, stack

import memo


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.covering(2)
@pytest.mark.parametrize("options", [{}, {"alpha": 0.5}, {"alpha": 1.0}, {"device": "64MiB", "alpha": 0.5}], ids=str)
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("steps", [0, 4])
def test_a_model_and_its_engine_go_with_their_last_reference(options: Any, closes: bool, steps: int) -> None:
    model = stack()
    manager = memo.offload(model, host="16MiB", disk=[], min_bytes=1, **options)
    for step in range(steps):
        with manager:
            loss = model(ids(step))
        loss.backward()
        model.zero_grad()
        del loss
    if closes:
        manager.close()
    known = weakref.ref(model), weakref.ref(manager._engine), weakref.ref(manager._recompute_policy)
    del model, manager
    assert [reference() for reference in known] == [None] * 3
