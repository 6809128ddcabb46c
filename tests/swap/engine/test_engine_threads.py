"""Two threads in one engine: at the moments between two of its steps another thread acts, and nothing is lost or shared."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from race_checker import CheckingBackend
from small_models import assert_equal, checked, gradients, ids, stack, train

from memo.swap import Engine
from memo.swap.engine.saved_storage import SavedStorage
from memo.swap.tiers import HostTier

if TYPE_CHECKING:
    from collections.abc import Callable


def elsewhere(action: Callable[[], Any]) -> None:
    """Runs `action` in another thread, to its end."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # told to the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the other thread hangs"
    if failed:
        raise failed[0]


class Interrupted:
    """A lock before whose first use with `with` another thread gets to run."""

    def __init__(self, lock: threading.Lock, action: Callable[[], Any]) -> None:
        self._lock = lock
        self._actions = [action]
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> None:
        if self._actions:
            elsewhere(self._actions.pop())
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("policy", ["lazy", "eager"])
def test_a_storage_packed_while_its_last_handle_dies_in_another_thread_is_a_new_life(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weak reference to an object still gives it back after its last reference is gone, until its finalizer has run."""
    backend = CheckingBackend(policy)
    engine = Engine(backend, [HostTier(backend, 1 << 20)], min_bytes=1)
    tensor = torch.arange(4096.0)
    group = engine.begin_layer(0, "layer", (), {}, last=False)
    handle = engine.pack(tensor)
    finalizer = SavedStorage.__del__
    again: list[Any] = []

    def interrupted(saved: SavedStorage) -> None:
        monkeypatch.setattr(SavedStorage, "__del__", finalizer)
        elsewhere(lambda: again.append(engine.pack(tensor)))
        finalizer(saved)

    monkeypatch.setattr(SavedStorage, "__del__", interrupted)
    del handle
    assert len(again) == 1
    engine.end_layer(group, between=False)
    engine.end_layer(engine.begin_layer(1, "next", (), {}, last=True), between=False)  # sources go
    assert torch.equal(engine.unpack(again[0]), tensor)
    assert engine.stats.live_entries == 1
    again.clear()
    assert engine.stats.live_entries == 0
    engine.close()
    assert engine.stats.device_bytes == 0
    assert engine.tiers[0].used == 0
    assert backend.races == []


def test_a_divided_storage_whose_source_goes_as_backward_asks_for_it_is_computed_again() -> None:
    """Another thread's forward retires the last layer between backward's call and the lock."""
    model = stack(layers=4)
    made = checked(model, alpha=0.25)
    warm = train(model, lambda step: model(ids(step)), made.manager, steps=1)
    second: list[torch.Tensor] = []

    def forward() -> None:
        with made.manager:
            second.append(model(ids(2)))

    with made.manager:
        first = model(ids(1))
    kept = made.engine.stats.bytes_recomputed
    lock = made.engine._lock
    made.engine._lock = Interrupted(lock, forward)  # type: ignore[assignment]
    first.backward()
    made.engine._lock = lock
    got = gradients(model)
    model.zero_grad()
    second[0].backward()
    got_second = gradients(model)
    assert made.engine.stats.bytes_recomputed > kept
    assert made.backend.races == []

    reference = stack(layers=4)
    assert_equal(warm, train(reference, lambda step: reference(ids(step)), steps=1))
    for number, ours in ((1, got), (2, got_second)):
        reference.zero_grad()
        reference(ids(number)).backward()
        for a, b in zip(ours, gradients(reference), strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)
    made.manager.close()
