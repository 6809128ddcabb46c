"""H2D side of the engine: reloads what backward asks for, prefetches what it asks for next, recomputes what no tier has.

It owns the order of reloads and how far ahead of backward they run. The invariant: nothing is handed to autograd before its
reload is ordered (E4) and, where only its first tokens moved, before the others are computed.

    backward   ... | layer 2 | layer 1 | layer 0           first unpack of layer 2: reload 1 while 2 computes
    reloads        |    in 1 |    in 0 |                   unpack: compute waits for the reload it needs
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.errors import SwapError
from memo.events import StallCause, Tier as TierName, UseKind
from memo.swap.engine.saved_storage import AWAY, BACK, LEAVING, LIVE, RETURNING, by_home

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from memo.swap.backends.protocol import Backend, Event
    from memo.swap.engine.layer_calls import LayerCalls
    from memo.swap.engine.release import Release
    from memo.swap.engine.saved_storage import Group, SavedStorage
    from memo.swap.engine.stream_order import StreamOrder
    from memo.swap.engine.telemetry import Telemetry
    from memo.swap.engine.token_prefix import TokenPrefix, TokenRange, Wanted

__all__ = ["Reload"]

_DEVICE = TierName.DEVICE
_RELOAD = StallCause.RELOAD
_LIVE, _PREFETCHED, _FETCHED = UseKind.LIVE, UseKind.PREFETCHED, UseKind.FETCHED


class Reload:
    """H2D side of an Engine: reload, prefetch, recompute. Callers hold the engine lock, except for `recompute`, which
    acquires it."""

    def __init__(
        self,
        lock: threading.Lock,
        backend: Backend,
        edges: StreamOrder,
        endings: Release,
        *,
        groups: LayerCalls,
        account: Telemetry,
        prefetch_bytes: int | None,
    ) -> None:
        self.prefetch_bytes = prefetch_bytes
        """How much may be reloaded ahead of backward; None for one layer."""
        self.closed = False
        """The tiers are closed: what is away stays away."""
        self._lock = lock
        self._backend = backend
        self._order = edges
        self._release = endings
        self._groups = groups
        self._telemetry = account

    def bring(self, saved: SavedStorage) -> None:
        """Makes a storage ready for autograd, when backward first asks for it. Raises SwapError where its reload failed."""
        if saved.source is not None:
            self._forward(saved)
            return
        how = _PREFETCHED
        if saved.state is AWAY:
            self._refuse_if_closed(saved)
            how = _FETCHED
            self._fetch([saved])
        try:
            self.hand_over(saved)
        except SwapError:
            saved.returned = saved.returning = None
            if saved.part is not None:
                self._telemetry.stats.device_bytes -= saved.part.forget()
            self._telemetry.stats.device_bytes -= saved.nbytes
            saved.move_to(AWAY)
            raise
        if saved.part is not None:
            assert saved.returned is not None
            self._telemetry.stats.device_bytes -= saved.part.returned(saved.returned, self._backend)
        saved.move_to(BACK)
        self._telemetry.used(saved, how)

    def hand_over(self, saved: SavedStorage) -> None:
        """Orders the caller's stream after the reload and after the buffer's last user (E4, E6)."""
        account = self._telemetry
        stops_host = saved.returning is not None and self._backend.would_block(saved.returning)
        began = account.begin_wait(stops_host=stops_host)
        try:
            self._order.copied_back(saved)
        finally:
            account.waited(began, _RELOAD, saved.group.module, saved.id)
        if saved.part is not None:
            self._order.taken_over(saved)
        saved.user = self._backend.current_stream()

    def recompute(self, saved: SavedStorage, part: TokenPrefix) -> None:
        """Computes again what no tier has of `saved` and its layer's other storages, while their first tokens arrive."""
        with self._lock:
            self._refuse_if_closed(saved)
            if saved.group is not self._groups.reading and not self.closed:
                self.reach(saved.group)
            if saved.state is AWAY:
                self._fetch([saved])
        began = self._backend.stamp()
        with self._telemetry.issuing("recompute", saved.module):
            part.call.recompute(self._fill)
        self._telemetry.recomputed(began, saved.module)
        if not part.filled and saved.source is None:
            raise AssertionError(f"the recompute of {saved.module} did not give saved storage {saved.id}")

    def reach(self, group: Group) -> None:
        """Backward has come to this group: reload it, and what the expected order says comes after it (R7)."""
        self._telemetry.comes_to_edge(group.module)
        before = self._groups.reading
        self._groups.reached(group)
        if before is not None and self._groups.comes_again(before):
            self._let_go(before)
        if self._telemetry.journal is not None:
            self._telemetry.journal.backward_reached(group.module)
        self._release.poll_limbo()
        if not self._fetch_group(group, [saved for saved in group.living() if saved.state is AWAY]):
            return
        room = self.prefetch_bytes
        for ahead, following in enumerate(self._groups.after(group)):
            # Of what nothing has to be brought from another tier there is nothing to do before backward asks for it.
            away = [saved for saved in following.living() if saved.state is AWAY and _is_elsewhere(saved)]
            nbytes = sum(saved.nbytes for saved in away)
            if ahead and (room is None or nbytes > room):  # one layer ahead is what overlap needs in any case
                break
            if not self._fetch_group(following, away):
                break
            room = None if room is None else room - nbytes

    def look_ahead(self) -> None:
        """A forward is at its last layer: what the backward after it is expected to want first comes back meanwhile.

        In a pipeline that is another microbatch's, and the layer whose place it takes on the device has just left it.
        """
        first = next(self._groups.upcoming(), None)
        if first is not None:
            self._fetch_group(
                first, [saved for saved in first.living() if saved.state is AWAY and _is_elsewhere(saved)]
            )

    def _let_go(self, group: Group) -> None:
        """What was brought back is still where it came from; until the other half of this group's backward the room is free.

        What was computed again stays: it would have to be once more.
        """
        for saved in group.living():
            if saved.state is BACK and saved.part is None and saved.returned is not None:
                # Who has used it waited for it, and its home waits for who has used it: E3 and E4 hold anew.
                saved.returned = saved.returning = None
                self._telemetry.stats.device_bytes -= saved.nbytes
                saved.move_to(AWAY)

    def _forward(self, saved: SavedStorage) -> None:
        """Hands out a source that is not released yet (R6), and cancels its copy out where that has not begun."""
        stats = self._telemetry.stats
        if saved.state is LEAVING and saved.out is not None:
            assert saved.place is not None
            if saved.out.cancel():
                stats.cancelled += 1
                stats.moved(saved.place.tier.name, -saved.moving_nbytes)
                saved.place.release()
                saved.place = saved.out = None
                saved.move_to(LIVE)
        stats.bytes_forwarded += saved.nbytes
        self._telemetry.used(saved, _LIVE)

    def _fetch_group(self, group: Group, away: Sequence[SavedStorage]) -> bool:
        """Reloads what the group has away; False when the device had no room for all of it.

        What is not reloaded here is fetched when backward asks for it, when less is held than now.
        """
        in_turn = away[::-1]  # backward asks in about this order
        try:
            self._fetch([saved for saved in in_turn if not _is_aside(saved)])
            for saved in in_turn:
                if _is_aside(saved):
                    # One by one: each gives up its room beside the buffer before the next takes a buffer.
                    self._fetch([saved])
        except torch.OutOfMemoryError:
            self._telemetry.warn("prefetch", f"no device memory to reload {group.module} ahead; reloading on demand")
            return False
        return True

    def _fetch(self, wanted: Sequence[SavedStorage]) -> None:
        """Allocates buffers on their home streams and issues the reloads into them.

        Raises:
            torch.OutOfMemoryError: there was no room for all of them; those that got a buffer are on their way.
        """
        for home, those in by_home(wanted).items():
            with self._backend.stream_context(home):
                self._fetch_at_home(home, those)

    def _fetch_at_home(self, home: int, wanted: Sequence[SavedStorage]) -> None:
        """All reloads after one event (E3)."""
        buffers: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        try:
            for saved in wanted:
                buffer = self._backend.empty(saved.nbytes)
                targets.append(buffer if saved.part is None else saved.part.returning(buffer, self._backend))
                buffers.append(buffer)
                beside = 0 if saved.part is None else saved.part.incoming_nbytes
                self._telemetry.stats.came_to_device(saved.nbytes + beside)
        finally:
            if buffers:
                event = self._order.allocated(home)
                for saved, buffer, target in zip(wanted, buffers, targets, strict=False):
                    self._reload(saved, buffer, target, event)

    def _reload(self, saved: SavedStorage, buffer: torch.Tensor, target: torch.Tensor, event: Event) -> None:
        stats = self._telemetry.stats
        place = saved.place
        if place is not None:  # None where all of it is computed again
            nbytes = saved.nbytes if saved.part is None else saved.part.head_nbytes
            tier = place.tier
            with self._telemetry.issuing(tier.lane_in, saved.module):
                saved.returning = place.enter(target, after=event)
            if tier.name is not _DEVICE:
                stats.bytes_reloaded += nbytes
                if self._telemetry.journal is not None:
                    self._telemetry.journal.copying(saved.id, nbytes, tier.lane_in, saved.returning)
        saved.returned = buffer
        saved.user = saved.home
        saved.move_to(RETURNING)

    def _fill(self, span: TokenRange, wanted: Wanted, tail: torch.Tensor) -> None:
        """Recomputed tokens of a storage take their place behind those that a tier had."""
        hold = wanted.hold()
        if hold is None:
            return  # backward is through with it
        saved = hold.saved
        with self._lock:
            if saved.source is not None or saved.part is None or not saved.part.lacks(span.first):
                return
            if saved.state is AWAY:
                self._fetch([saved])
            assert saved.returned is not None
            self._order.taken_over(saved)
            self._telemetry.stats.bytes_recomputed += saved.part.fill(saved.returned, tail, span, self._backend)

    def _refuse_if_closed(self, saved: SavedStorage) -> None:
        if self.closed and not saved.on_device:
            raise SwapError(
                f"the manager was closed before backward asked for what {saved.module} saved; close it after backward"
            )


def _is_elsewhere(saved: SavedStorage) -> bool:
    """In another tier than the device's."""
    return saved.place is not None and saved.place.tier.name is not _DEVICE


def _is_aside(saved: SavedStorage) -> bool:
    """Copied aside on the device."""
    return saved.place is not None and saved.place.tier.name is _DEVICE
