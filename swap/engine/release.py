"""Release of saved storages: the last handle dies, in any thread, and memory and places are given back.

It owns the storages that were dropped and wait for the engine's lock, and the limbo (E5): storages that nobody needs any
more while a copy still touches their memory. It waits for no copy unless that memory is wanted.

    last handle dies -> dropped -> ended -> free             no copy in flight, or one that could be taken back
                                        -> limbo -> free     when that copy is done
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from memo.errors import SwapError
from memo.events import StallCause
from memo.swap.engine.saved_storage import GONE, LEAVING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    import torch

    from memo.swap.backends.protocol import Backend
    from memo.swap.engine.layer_calls import LayerCalls
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.engine.stream_order import StreamOrder
    from memo.swap.engine.telemetry import Telemetry

__all__ = ["Release"]

_DRAIN = StallCause.DRAIN


class Release:
    """Releases an Engine's storages. Callers hold the engine lock, except for `drop` and `drain`, which take it if free."""

    def __init__(
        self, lock: threading.Lock, backend: Backend, edges: StreamOrder, *, groups: LayerCalls, account: Telemetry
    ) -> None:
        self.dropped: collections.deque[SavedStorage] = collections.deque()
        """Storages that wait for the lock to be released; look here before calling `drain`."""
        self.when_idle: Callable[[], None] | None = None
        """Called whenever nothing is saved any more, with the lock held and in any thread."""
        self._lock = lock
        self._backend = backend
        self._order = edges
        self._groups = groups
        self._telemetry = account
        self._limbo: collections.deque[SavedStorage] = collections.deque()

    def drop(self, saved: SavedStorage) -> None:
        """The last handle of a storage is gone. May run in any thread, also inside the engine's own locked sections."""
        if self._lock.acquire(blocking=False):
            try:
                self._end(saved)
            finally:
                self._lock.release()
        else:
            self.dropped.append(saved)
        # Whoever has the lock may have let go of it between the two lines above.
        if self.dropped:
            self.drain()

    def drain(self) -> None:
        """Ends what was dropped, now or, where the lock is taken, when whoever has it drains."""
        while self.dropped and self._lock.acquire(blocking=False):
            try:
                self._end_dropped()
            finally:
                self._lock.release()

    def clear_limbo(self, *, leave: int = 0) -> None:
        """Frees what a copy had kept back. The compute stream waits rather than the host, as in E2.

        Where only the host could wait, up to `leave` bytes stay.
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
                    # Nobody needs these bytes any more; the failure itself must still be seen.
                    self._telemetry.warn("dropped-copy", f"{error} (nothing was lost: the tensor was no longer needed)")
                self._telemetry.waited(began, _DRAIN, saved.module, saved.id, stream=saved.home)
            self._free(saved)

    def clear_limbo_of(self, storage: torch.UntypedStorage) -> None:
        """A storage is saved again whose handles are gone: what was on its way for them must not count twice."""
        self._end_dropped()
        if any(old.source is not None and old.source.untyped_storage() is storage for old in self._limbo):
            self.clear_limbo()

    @property
    def has_limbo(self) -> bool:
        return bool(self._limbo)

    def poll_limbo(self) -> None:
        """Frees what is done already; waits for nothing."""
        for _ in range(len(self._limbo)):
            saved = self._limbo.popleft()
            if self._order.in_flight(saved) is None:
                self._free(saved)
            else:
                self._limbo.append(saved)

    def _end_dropped(self) -> None:
        while self.dropped:
            self._end(self.dropped.popleft())

    def _end(self, saved: SavedStorage) -> None:
        stats = self._telemetry.stats
        stats.live_entries -= 1
        if not stats.live_entries and self.when_idle is not None:
            self.when_idle()
        group, groups = saved.group, self._groups
        group.alive -= 1
        if not group.alive and group is not groups.open:
            groups.forget(group)
            if group is groups.reading and self._telemetry.journal is not None:
                self._telemetry.journal.backward_left()
        if self._order.in_flight(saved) is None:
            self._free(saved)
        elif saved.state is LEAVING and saved.out is not None and saved.out.cancel():
            assert saved.place is not None
            stats.cancelled += 1
            stats.moved(saved.place.tier.name, -saved.moving_nbytes)
            self._free(saved)
        else:
            if saved.part is not None:
                saved.part.abandon()
            self._limbo.append(saved)  # E5

    def _free(self, saved: SavedStorage) -> None:
        if saved.source is not None or saved.returned is not None:
            self._telemetry.stats.device_bytes -= saved.nbytes
        saved.source = saved.returned = None
        if saved.part is not None:
            self._telemetry.stats.device_bytes -= saved.part.left() + saved.part.forget()
        if saved.place is not None:
            saved.place.release()
            saved.place = None
        saved.move_to(GONE)
