"""Release of saved storages: memory and extents are given back when the last handle dies, in any thread.

It owns the dropped storages that wait for the engine lock, and the limbo (E5): storages without handles whose memory a copy
still touches. It waits for a copy only where that memory is needed.

    last handle dies -> dropped -> ended -> free             no copy in flight, or the copy was cancelled
                                        -> limbo -> free     when the copy is done
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from memo.errors import SwapError
from memo.events import StallCause
from memo.swap.engine.saved_storage import BACK, GONE, LEAVING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    import torch

    from memo.swap.backends.protocol import Backend
    from memo.swap.engine.layer_calls import LayerCalls
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.engine.stream_order import StreamOrder
    from memo.swap.engine.telemetry import Telemetry

_DRAIN = StallCause.DRAIN


class Release:
    """Releases an Engine's storages.

    Callers hold the engine lock, except for `drop` and `end_dropped`, which acquire it if it is free.
    """

    def __init__(
        self,
        lock: threading.RLock,
        backend: Backend,
        order: StreamOrder,
        *,
        layer_calls: LayerCalls,
        telemetry: Telemetry,
    ) -> None:
        self.dropped: collections.deque[SavedStorage] = collections.deque()
        """Storages without handles that wait for the lock; check it before calling `end_dropped`."""
        self.when_idle: Callable[[], None] | None = None
        """Called when the last saved storage ends, with the lock held and in any thread."""
        self._lock = lock
        self._backend = backend
        self._order = order
        self._layer_calls = layer_calls
        self._telemetry = telemetry
        self._limbo: collections.deque[SavedStorage] = collections.deque()

    def drop(self, saved: SavedStorage) -> None:
        """Finalizer of a storage whose last handle is gone. Any thread, also inside the engine's own locked sections."""
        self.dropped.append(saved)
        self.end_dropped()

    def end_dropped(self) -> None:
        """Ends the dropped storages; where the lock is taken, its holder does so when it releases the lock."""
        lock = self._lock
        if lock._is_owned():  # type: ignore[attr-defined]
            return
        try:
            while self.dropped and lock.acquire(blocking=False):
                self._end_dropped_locked()
                lock.release()  # another thread may have dropped one since, and left it to this one
        finally:
            self.free_lock()

    def free_lock(self) -> None:
        """Frees the lock if an interruption has left it taken. The calling thread has no locked section under way."""
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()

    def clear_limbo(self, *, leave: int = 0) -> None:
        """Frees the storages in limbo. The compute stream waits for their copies rather than the host, as in E2.

        Args:
            leave: bytes that may stay where only the host could wait.
        """
        for _ in range(len(self._limbo)):
            saved = self._limbo.popleft()
            event = self._order.in_flight(saved)
            if event is not None:
                if saved.nbytes <= leave and self._backend.would_block(event):
                    leave -= saved.nbytes
                    self._limbo.append(saved)
                    continue
                began = self._telemetry.begin_wait(saved.home, stops_host=self._backend.would_block(event))
                try:
                    self._order.abandoned(saved, event)
                except SwapError as error:
                    # These bytes are needed no more; the failure itself must still be reported.
                    self._telemetry.warn("dropped-copy", f"{error} (nothing was lost: the tensor was no longer needed)")
                self._telemetry.waited(began, _DRAIN, saved.module, saved.id, stream=saved.home)
            self._free(saved)

    def clear_limbo_of(self, storage: torch.UntypedStorage) -> None:
        """Frees the former life of a storage that is saved again, so that its memory is not counted twice."""
        self._end_dropped_locked()
        if any(old.source is not None and old.source.untyped_storage() is storage for old in self._limbo):
            self.clear_limbo()

    @property
    def has_limbo(self) -> bool:
        """True while storages without handles wait for a copy."""
        return bool(self._limbo)

    def poll_limbo(self) -> None:
        """Frees the storages in limbo whose copies are done; waits for nothing."""
        for _ in range(len(self._limbo)):
            saved = self._limbo.popleft()
            if self._order.in_flight(saved) is None:
                self._free(saved)
            else:
                self._limbo.append(saved)

    def _end_dropped_locked(self) -> None:
        while self.dropped:
            self._end(self.dropped.popleft())

    def _end(self, saved: SavedStorage) -> None:
        stats, group = self._telemetry.stats, saved.group
        if not group.is_lost:
            stats.ended(saved.nbytes)
            if not stats.live_entries and self.when_idle is not None:
                self.when_idle()
        group.alive -= 1
        if not group.alive:
            layer_calls = self._layer_calls
            if group is not layer_calls.open:
                layer_calls.forget(group)
                if group is layer_calls.reading and self._telemetry.trace is not None:
                    self._telemetry.trace.backward_left()
        if saved.state is BACK or self._order.in_flight(saved) is None:  # BACK: the reload has been waited for
            self._free(saved)
        elif saved.state is LEAVING and saved.out is not None and saved.out.cancel():
            assert saved.extent is not None
            stats.cancelled += 1
            self._telemetry.left(saved, saved.extent.tier.name, -1)
            self._free(saved)
        else:
            saved.replay = None  # and all that it holds
            self._limbo.append(saved)  # E5

    def _free(self, saved: SavedStorage) -> None:
        stats, extent = self._telemetry.stats, saved.extent
        counted = stats.device_bytes
        if saved.source is not None or saved.returned is not None:
            stats.device_bytes -= saved.nbytes
        saved.source = saved.returned = None
        if saved.coded is not None:
            stats.device_bytes -= saved.coded.drop(stats) + saved.coded.discard()
        if extent is not None:
            saved.extent = None
            extent.tier.release(extent)
        if saved.group.is_lost:
            stats.device_bytes = counted
        saved.move_to(GONE)
