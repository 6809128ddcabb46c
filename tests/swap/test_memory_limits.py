"""Memory that is not there: prefetch shrinks, a refused arena is raised, and nothing is lost or counted wrong."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import assert_equal, ids, stack, train

import memo
from memo.errors import HostBudgetExceeded, SwapError

if TYPE_CHECKING:
    from pathlib import Path


class LittleMemory:
    """A device that has room for `limit` bytes of reloaded buffers at a time."""

    def __init__(self, manager: memo.Manager, limit: int) -> None:
        self.backend: Any = manager._engine.backend
        self.limit = limit
        self.used = 0
        self.refused = 0
        self.original = self.backend.empty
        self.backend.empty = self.empty

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.used + nbytes > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError(f"tried to allocate {nbytes} bytes")
        tensor: torch.Tensor = self.original(nbytes)
        self.used += nbytes
        weakref.finalize(tensor.untyped_storage(), self.freed, nbytes)
        return tensor

    def freed(self, nbytes: int) -> None:
        self.used -= nbytes


def plain(**kwargs: Any) -> Any:
    model = stack(**kwargs)
    return train(model, lambda step: model(ids(step)))


def test_prefetch_shrinks_when_the_device_is_full_and_gradients_are_equal(tmp_path: Path) -> None:
    model = stack(layers=5)
    manager = memo.offload(model, alpha=1.0, disk=tmp_path, min_bytes=512)
    layer = 16 * 2 * 48 * 32 * 4 + 4096
    memory = LittleMemory(manager, int(1.3 * layer))
    with pytest.warns(RuntimeWarning, match="reloading on demand") as caught:
        got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, plain(layers=5))
    assert memory.refused > 0
    assert len([w for w in caught if "on demand" in str(w.message)]) == 1, "warned once"
    manager.close()


def test_a_device_too_small_for_one_tensor_is_an_error_and_the_next_step_works(tmp_path: Path) -> None:
    model = stack()
    manager = memo.offload(model, alpha=1.0, disk=tmp_path, min_bytes=512)
    memory = LittleMemory(manager, 10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(torch.OutOfMemoryError):
            train(model, lambda step: model(ids(step)), manager)
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    memory.limit = 1 << 40
    model.load_state_dict(stack().state_dict())
    model.zero_grad()
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    assert manager.stats.live_entries == 0
    manager.close()


def test_an_arena_that_the_system_refuses_is_raised_and_counted_nowhere(tmp_path: Path) -> None:
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="1MiB", disk=[], min_bytes=512)
    backend: Any = manager._engine.backend
    original = backend.empty_host

    def refuse(nbytes: int) -> torch.Tensor:
        raise SwapError("cannot page-lock")

    backend.empty_host = refuse
    with pytest.raises(SwapError, match="page-lock"), manager:
        model(ids())
    gc.collect()
    tier: Any = manager._engine.tiers[0]
    assert (tier.used, tier.reserved, manager.stats.live_entries) == (0, 0, 0)
    backend.empty_host = original
    model.zero_grad()
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    manager.close()


def test_a_host_budget_is_refused_before_anything_is_taken() -> None:
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="40KiB", disk=[], min_bytes=512)
    with pytest.raises(HostBudgetExceeded, match=r"no room for .* saved by layers\.0 .*40 KiB"), manager:
        model(ids())
    assert manager.report().tiers[1].peak_bytes <= 40 << 10
    gc.collect()
    manager.close()
