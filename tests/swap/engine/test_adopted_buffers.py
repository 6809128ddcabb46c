"""Storages that a recompute makes whole: what it made becomes the reload buffer, without a copy and without a race."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from race_checker import CheckingBackend

from memo.swap import Engine
from memo.swap.engine.handles import Handle
from memo.swap.engine.saved_storage import AWAY, BACK, RETURNING, FillCallback, Hold, SavedStorage
from memo.swap.engine.stream_order import StreamOrder
from memo.swap.tiers import HostTier

FLOATS = 1024
NBYTES = 4 * FLOATS


@dataclasses.dataclass(frozen=True)
class One:
    """The wanted tensor of a storage."""

    hold: weakref.ref[Hold]
    value: float


class Replay:
    """Makes each storage anew, full of its value, on the stream that asks."""

    together = False

    def __init__(self, backend: CheckingBackend, *, more: int = 0) -> None:
        self.backend = backend
        self.more = more  # bytes that its storages are larger by
        self.wanted: list[One] = []
        self.runs = 0
        self.fails_after: int | None = None
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def recompute(self, take: FillCallback) -> None:
        self.runs += 1
        self.made.clear()
        for number, one in enumerate(self.wanted):
            if number == self.fails_after:
                raise RuntimeError("broken off")
            hold = one.hold()
            if hold is None or not hold.saved.lacks_replay:
                continue
            made = torch.full((FLOATS + self.more // 4,), one.value)
            self.backend.allocates(made)
            self.made.append(weakref.ref(made.untyped_storage()))
            block = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage(), 0, (NBYTES,), (1,))
            take(one, block)


class Saving:
    """An engine, and one layer that has saved some storages, all to be recomputed."""

    def __init__(self, count: int = 3, policy: Any = "lazy", *, stream: int = 0, **replay: Any) -> None:
        self.backend = CheckingBackend(policy)
        self.engine = Engine(self.backend, [HostTier(self.backend, 1 << 20)], min_bytes=1)
        self.replay = Replay(self.backend, **replay)
        self.allocated = 0
        empty = self.backend.empty

        def counted(nbytes: int) -> torch.Tensor:
            self.allocated += nbytes
            return empty(nbytes)

        self.backend.empty = counted  # type: ignore[method-assign]
        self.handles = self._forward(count, stream)

    def _forward(self, count: int, stream: int) -> list[Handle]:
        engine, handles = self.engine, []
        engine.begin_forwards()
        group = engine.begin_layer(0, "layer", (), {}, last=False)
        group.held = True
        with self.backend.stream_context(stream):
            for number in range(count):
                handle = engine.pack(torch.full((FLOATS,), float(number)))
                assert isinstance(handle, Handle)
                handles.append(handle)
        for number, handle in enumerate(handles):
            self.replay.wanted.append(One(handle.hold.saved.hold, float(number)))
        engine.copy_out_held(group, {handle.hold.saved: self.replay for handle in handles})
        engine.end_layer(group, between=False)
        engine.end_forwards()
        assert engine.stats.device_bytes == 0
        assert all(handle.hold.saved.state is AWAY for handle in handles)
        return handles

    def saved(self, number: int) -> SavedStorage:
        return self.handles[number].hold.saved

    def read(self, number: int, stream: int = 0) -> torch.Tensor:
        with self.backend.stream_context(stream):
            tensor = self.engine.unpack(self.handles[number])
            assert torch.equal(tensor, torch.full((FLOATS,), float(number)))
            self.backend.reads(tensor)
        return tensor

    def end(self) -> None:
        """Ends all lives; nothing may be left, and nothing may have raced."""
        self.handles.clear()
        gc.collect()
        self.engine.close()
        assert self.backend.races == []
        assert (self.engine.stats.live_entries, self.engine.stats.device_bytes) == (0, 0)


def test_what_a_recompute_made_is_the_buffer_and_nothing_is_allocated_or_copied() -> None:
    saving = Saving()
    tensor = saving.read(0)
    assert [made() for made in saving.replay.made] == [saving.saved(n).returned.untyped_storage() for n in range(3)]  # type: ignore[union-attr]
    assert tensor.untyped_storage() is saving.replay.made[0]()
    assert saving.allocated == 0
    assert saving.engine.stats.device_bytes == saving.engine.stats.peak_device_bytes == 3 * NBYTES
    assert saving.engine.stats.bytes_recomputed == 3 * NBYTES
    assert [saving.saved(n).state for n in range(3)] == [BACK, RETURNING, RETURNING]
    for number in (1, 2):
        saving.read(number)
    assert saving.replay.runs == 1
    assert saving.engine.stats.bytes_reloaded == 0
    del tensor
    saving.end()
    assert all(made() is None for made in saving.replay.made)


def test_memory_that_is_larger_is_copied() -> None:
    saving = Saving(more=64)
    for number in range(3):
        saving.read(number)
    assert saving.allocated == 3 * NBYTES
    assert all(made() is None for made in saving.replay.made)
    assert saving.engine.stats.device_bytes == saving.engine.stats.peak_device_bytes == 3 * NBYTES
    saving.end()


def test_a_recompute_on_another_stream_than_the_home_is_copied() -> None:
    saving = Saving(stream=1)
    saving.backend.wait_for(1)
    for number in range(3):
        saving.read(number, stream=0)
    assert saving.allocated == 3 * NBYTES
    assert all(made() is None for made in saving.replay.made)
    saving.end()


@pytest.mark.parametrize("count", [1, 4])
def test_the_peak_of_a_replay_has_each_storage_once(count: int) -> None:
    saving = Saving(count)
    with LiveBytes() as measured:
        saving.engine.unpack(saving.handles[0])
    assert measured.peak == count * NBYTES
    saving.end()


def test_another_stream_waits_for_the_one_that_made_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first storage is asked for on the home, which recomputes them all; the second on the other stream (E6)."""
    saving = Saving()
    saving.read(0)
    saving.read(1, stream=1)
    saving.read(1)
    saving.end()
    monkeypatch.setattr(StreamOrder, "taken_over", lambda order, saved: None)
    saving = Saving()
    saving.read(0)
    with pytest.raises(AssertionError, match="races with write"):
        saving.read(1, stream=1)


def test_memory_that_another_stream_read_last_is_not_used_again_before_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving()
    saving.read(0)
    saving.read(1, stream=1)
    saving.end()
    monkeypatch.setattr(
        CheckingBackend,
        "compute_uses",
        lambda backend, buffer, stream=None, *, writes=True: backend.access(
            backend._ticking(backend.current), buffer, write=writes
        ),
    )
    saving = Saving()
    saving.read(0)
    saving.read(1, stream=1)
    saving.handles.clear()
    gc.collect()
    assert any("memory freed" in race for race in saving.backend.races)


def test_a_replay_that_is_broken_off_keeps_what_it_made_and_the_next_one_makes_the_rest() -> None:
    saving = Saving()
    saving.replay.fails_after = 2
    with pytest.raises(RuntimeError, match="broken off"):
        saving.read(2)
    assert [saving.saved(n).state for n in range(3)] == [RETURNING, RETURNING, AWAY]
    assert saving.engine.stats.device_bytes == 2 * NBYTES
    saving.read(0)
    saving.replay.fails_after = None
    saving.read(2)
    assert saving.replay.runs == 2
    assert len(saving.replay.made) == 1
    assert saving.engine.stats.device_bytes == saving.engine.stats.bytes_recomputed == 3 * NBYTES
    saving.end()


def test_a_dead_handle_wants_nothing_and_an_unread_buffer_is_freed_with_its_handle() -> None:
    saving = Saving()
    del saving.handles[2]
    gc.collect()
    saving.read(0)
    assert saving.engine.stats.device_bytes == 2 * NBYTES
    del saving.handles[1]
    gc.collect()
    assert saving.engine.stats.device_bytes == NBYTES
    assert saving.replay.made[1]() is None
    saving.end()


def test_a_buffer_outlives_a_second_backward_and_the_first_half_of_a_split_one() -> None:
    """Recomputed storages are dropped with their handles only: they would have to be recomputed once more."""
    saving = Saving()
    saving.engine.expect([(0, 0), (1, 0), (1, 0), (0, 0)])
    saving.engine.begin_forwards()
    group = saving.engine.begin_layer(1, "other", (), {}, last=False)
    other = saving.engine.pack(torch.ones(FLOATS))
    saving.engine.end_layer(group, between=False)
    saving.engine.end_forwards()
    first = saving.read(0)
    saving.engine.unpack(other)
    assert saving.read(0).data_ptr() == first.data_ptr()
    assert saving.replay.runs == 1
    del first, other
    saving.end()
