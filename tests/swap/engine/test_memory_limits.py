"""Memory that is not there: prefetch shrinks, a refused arena is raised, and nothing is lost or counted wrong."""

from __future__ import annotations

import contextlib
import functools
import gc
import resource
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import assert_equal, ids, stack, train

import memo
from memo.errors import HostBudgetExceeded, SwapError

if TYPE_CHECKING:
    from collections.abc import Iterator
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


@contextlib.contextmanager
def little_address_space() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 39, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("asked", ["in the step", "by a plan"])
def test_addresses_that_the_system_refuses_are_one_line_and_the_next_step_works(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memo.manager.machine.total_host_bytes", lambda: 1 << 40)
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="1TiB", disk=[], min_bytes=512)
    tier: Any = manager._engine.tiers[0]

    def step() -> None:
        with manager:
            model(ids())

    ask = step if asked == "in the step" else functools.partial(tier.expect, 1 << 20)
    with (
        little_address_space(),
        pytest.raises(SwapError, match=r"^cannot map 1 TiB of host memory \(Cannot allocate memory\); lower .*$"),
    ):
        ask()
    gc.collect()
    assert (tier.used, tier.reserved, manager.stats.live_entries) == (0, 0, 0)
    model.zero_grad()
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    manager.close()


@pytest.mark.promise("R8")
def test_a_host_budget_is_refused_before_anything_is_taken() -> None:
    model = stack()
    manager = memo.offload(model, alpha=1.0, host="40KiB", disk=[], min_bytes=512)
    advice = r"raise the host budget, or give disk=\.\.\., on_full='recompute' or, above alpha 0, a smaller alpha$"
    with pytest.raises(HostBudgetExceeded, match=r"no room for .* saved by layers\.0 .*40 KiB.*; " + advice), manager:
        model(ids())
    assert manager.report().tiers[1].peak_bytes <= 40 << 10
    gc.collect()
    manager.close()
