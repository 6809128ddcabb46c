"""H2D side of the engine: reloads on demand, prefetch for the next layers of backward, recompute of what no tier has.

It owns the order of reloads and how far they run ahead of backward. The invariant: autograd gets no tensor before its reload
is ordered (E4) or its recompute is done.

    backward   ... | layer 2 | layer 1 | layer 0           first unpack of layer 2: reload 1 while 2 computes
    reloads        |    in 1 |    in 0 |                   unpack: compute waits for the reload it needs
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.errors import SwapError
from memo.events import StallCause, UseKind
from memo.swap.engine.saved_storage import AWAY, BACK, LEAVING, LIVE, RETURNING, by_home

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from memo.swap.backends.protocol import Backend, Event
    from memo.swap.engine.coded_copy import CodedCopy
    from memo.swap.engine.layer_calls import Group, LayerCalls
    from memo.swap.engine.release import Release
    from memo.swap.engine.saved_storage import HasHold, SavedStorage
    from memo.swap.engine.stream_order import StreamOrder
    from memo.swap.engine.telemetry import Telemetry

_RELOAD = StallCause.RELOAD
_LIVE, _PREFETCHED, _FETCHED = UseKind.LIVE, UseKind.PREFETCHED, UseKind.FETCHED


class Reload:
    """H2D side of an Engine: reload, prefetch, recompute.

    Callers hold the engine lock, except for `recompute`, which acquires it.

    Args:
        lock: the engine lock.
        backend: the device and its copy lanes.
        order: orderings between streams.
        release: its limbo is polled as backward proceeds.
        layer_calls: groups and the order expected of backward.
        telemetry: counters and trace.
    """

    def __init__(
        self,
        lock: threading.RLock,
        backend: Backend,
        order: StreamOrder,
        release: Release,
        *,
        layer_calls: LayerCalls,
        telemetry: Telemetry,
    ) -> None:
        self.prefetch_bytes: int | None = None
        """The most bytes reloaded ahead of backward; None: one layer."""
        self.overlap = True
        """False: nothing is reloaded ahead."""
        self.closed = False
        """The tiers are closed; nothing can be reloaded."""
        self._lock = lock
        self._backend = backend
        self._order = order
        self._release = release
        self._layer_calls = layer_calls
        self._telemetry = telemetry

    def bring(self, saved: SavedStorage) -> None:
        """Makes a storage ready for its first read: forwards its source, or waits for its reload.

        Raises:
            SwapError: its reload failed; the storage is AWAY again and may be asked for once more.
        """
        if saved.source is not None:
            self._forward_source(saved)
            return
        telemetry, how = self._telemetry, _PREFETCHED
        if saved.state is AWAY:
            self._refuse_if_closed(saved)
            how = _FETCHED
            self._fetch([saved])
        try:
            self.hand_over(saved)
        except SwapError:
            saved.returned = saved.returning = None
            saved.replayed = False
            if saved.coded is not None:
                self._telemetry.stats.device_bytes -= saved.coded.discard()
            self._telemetry.stats.device_bytes -= saved.nbytes
            saved.move_to(AWAY)
            raise
        if saved.coded is not None:
            self._telemetry.stats.device_bytes -= saved.coded.finish_reload(self._backend)
        saved.move_to(BACK)
        telemetry.stats.uses[how] += 1
        if telemetry.trace is not None:
            telemetry.trace.used(saved, how)

    def hand_over(self, saved: SavedStorage) -> None:
        """Orders the caller's stream after the reload (E4) and after the buffer's last user (E6).

        What the host issues from now on is after a reload that it knows to be done: no wait, and no time to measure.
        """
        telemetry, backend, returning = self._telemetry, self._backend, saved.returning
        if returning is not None and not backend.is_past(returning):
            began = telemetry.begin_wait(stops_host=backend.would_block(returning))
            try:
                self._order.copied_back(saved)
            finally:
                telemetry.waited(began, _RELOAD, saved.group.module, saved.id)
        if saved.replay is not None or saved.coded is not None:
            self._order.taken_over(saved)
        saved.user = backend.current_stream()

    def recompute(self, saved: SavedStorage) -> None:
        """Recomputes `saved`, and what else the same part of its layer's recompute gives.

        Raises:
            SwapError: the engine is closed.
        """
        with self._lock:
            self._refuse_if_closed(saved)
            if saved.group is not self._layer_calls.reading and not self.closed:
                self.reach(saved.group)
            absent = _absent_nbytes(saved)
        began = self._backend.stamp()
        self._telemetry.at_recompute(saved.module, begins=True, absent_nbytes=absent)
        with self._telemetry.issuing("recompute", saved.module):
            assert saved.replay is not None
            saved.replay.recompute(self._fill)
        self._telemetry.at_recompute(saved.module, begins=False, absent_nbytes=absent)
        self._telemetry.recomputed(began, saved.module)
        if saved.lacks_replay:
            raise AssertionError(f"the recompute of {saved.module} did not give saved storage {saved.id}")

    def recompute_readers(self, saved: SavedStorage) -> None:
        """Runs the parts of a recompute that read `saved` and have not run, before backward has it and may write into it.

        Raises:
            SwapError: the engine is closed.
        """
        for other in saved.group.living():
            if other.lacks_replay and any(reader() is other.replay for reader in saved.readers):
                self.recompute(other)

    def recompute_together(self, group: Group) -> None:
        """Runs a recompute that has collectives as soon as backward reaches its layer.

        So all ranks run it at the same place among the collectives of backward itself, whichever of the recomputed
        tensors each asks for first.

        Raises:
            SwapError: the engine is closed.
        """
        for saved in group.living():
            if saved.replay is not None and saved.replay.together and saved.lacks_replay:
                self.recompute(saved)
                return

    def reach(self, group: Group) -> None:
        """Records that backward has reached `group`; reloads it and prefetches the groups expected after it (R7)."""
        self._telemetry.at_layer_boundary(group.module)
        before = self._layer_calls.reading
        self._layer_calls.reached(group)
        if before is not None and self._layer_calls.comes_again(before):
            self._drop_reloaded(before)
        if self._telemetry.trace is not None:
            self._telemetry.trace.backward_reached(group.module)
        self._release.poll_limbo()
        away = _away_in_tiers(group)
        if away and not self._fetch_group(group, away):
            return
        room = self.prefetch_bytes
        for ahead, following in enumerate(self._layer_calls.after(group) if self.overlap else ()):
            if ahead and room is None:  # one layer ahead is what overlap needs in any case
                break
            away = _away_in_tiers(following)
            if room is not None:
                nbytes = sum([saved.nbytes for saved in away])
                if ahead and nbytes > room:
                    break
                room -= nbytes
            if not self._fetch_group(following, away):
                break

    def prefetch_first(self) -> None:
        """Prefetches, during the last layer of a forward, the group that backward is expected to reach first.

        In a pipeline that is another microbatch's; it takes the device memory that the layer before has just left.
        """
        first = next(self._layer_calls.upcoming(), None)
        if first is not None and self.overlap:
            self._fetch_group(first, _away_in_tiers(first))

    def _drop_reloaded(self, group: Group) -> None:
        """Drops a group's reload buffers until the second half of its split backward; the tiers still have the bytes.

        Recomputed storages stay, since they would have to be recomputed once more.
        """
        for saved in group.living():
            if saved.state is BACK and saved.replay is None and saved.returned is not None:
                # Each user has waited for it, and its home stream waits for each user: E3 and E4 hold for the next reload.
                saved.returned = saved.returning = None
                self._telemetry.stats.device_bytes -= saved.nbytes
                saved.move_to(AWAY)

    def _forward_source(self, saved: SavedStorage) -> None:
        """Hands out a source that is not released yet (R6), and cancels its copy out if that has not begun."""
        stats = self._telemetry.stats
        if saved.state is LEAVING and saved.out is not None:
            assert saved.extent is not None
            if saved.out.cancel():
                stats.cancelled += 1
                self._telemetry.left(saved, saved.extent.tier.name, -1)
                saved.extent.tier.release(saved.extent)
                saved.extent = saved.out = None
                saved.move_to(LIVE)
        if saved.coded is not None and saved.coded.block is not None:
            self._round_source(saved, saved.coded)
        if not saved.is_read:  # other tensors in the same storage are no other uses
            saved.is_read = True
            stats.bytes_forwarded += saved.nbytes
            stats.uses[_LIVE] += 1
        if self._telemetry.trace is not None:
            self._telemetry.trace.used(saved, _LIVE)

    def _round_source(self, saved: SavedStorage, coded: CodedCopy) -> None:
        """Replaces a source by what the reload would have brought, made on its home stream; the caller's follows."""
        source = saved.source
        assert source is not None
        if not coded.is_rounded:
            with self._backend.stream_context(saved.home):
                saved.source = rounded = coded.rounded(source, self._backend)
            self._backend.compute_uses(source, saved.home, writes=False)
            saved.user = saved.home
            source = rounded
        self._order.taken_over(saved)
        self._backend.compute_uses(source, writes=False)

    def _fetch_group(self, group: Group, away: Sequence[SavedStorage]) -> bool:
        """Issues the reloads of `away`; False if the device had no room for all of them.

        The rest is reloaded on demand, when less device memory is taken than now.
        """
        try:
            if away:
                self._fetch(away[::-1])  # backward asks in about this order
        except torch.OutOfMemoryError:
            self._telemetry.warn("prefetch", f"no device memory to reload {group.module} ahead; reloading on demand")
            return False
        return True

    def _fetch(self, wanted: Sequence[SavedStorage]) -> None:
        """Allocates buffers on their home streams and issues the reloads into them.

        Raises:
            torch.OutOfMemoryError: no room for all of them; the reloads of those that got a buffer are issued.
        """
        here = self._backend.current_stream()
        for home, those in by_home(wanted).items():
            if home == here:
                self._fetch_at_home(home, those)
                continue
            with self._backend.stream_context(home):
                self._fetch_at_home(home, those)

    def _fetch_at_home(self, home: int, wanted: Sequence[SavedStorage]) -> None:
        """Issues the reloads of storages of one home stream, all after one event (E3)."""
        backend, empty = self._backend, self._backend.empty
        made: list[tuple[SavedStorage, torch.Tensor, torch.Tensor]] = []
        nbytes = 0
        try:
            for saved in wanted:
                buffer = target = empty(saved.nbytes)
                if saved.coded is not None and saved.extent is not None:
                    target = saved.coded.reload_target(target, backend)
                    nbytes += saved.coded.arriving_nbytes
                made.append((saved, buffer, target))
                nbytes += saved.nbytes
        finally:
            if made:
                self._telemetry.stats.came_to_device(nbytes)
                event = self._order.allocated(home)
                for saved, buffer, target in made:
                    self._issue_reload(saved, buffer, target, event)

    def _issue_reload(self, saved: SavedStorage, buffer: torch.Tensor, target: torch.Tensor, event: Event) -> None:
        extent = saved.extent
        if extent is not None:  # None where it is recomputed
            tier, trace = extent.tier, self._telemetry.trace
            if trace is None:
                saved.returning = tier.read(extent, target, after=event)
            else:
                with trace.range(f"{tier.lane_in} {saved.group.module}"):
                    saved.returning = tier.read(extent, target, after=event)
            self._telemetry.stats.bytes_reloaded += saved.place_nbytes
            if trace is not None:
                trace.copying(saved, tier.lane_in, saved.returning)
        saved.returned = buffer
        saved.user = saved.home
        saved.move_to(RETURNING)

    def _fill(self, wanted: HasHold, recomputed: torch.Tensor) -> None:
        """Takes a recomputed storage as the reload buffer, or copies it into one."""
        hold = wanted.hold()
        if hold is None:
            return  # no handle is left
        saved = hold.saved
        with self._lock:
            if not saved.lacks_replay:
                return
            if saved.state is not AWAY or not self._adopt(saved, recomputed):
                if saved.state is AWAY:
                    self._fetch([saved])
                assert saved.returned is not None
                self._order.taken_over(saved)
                saved.returned.copy_(recomputed)
                self._backend.compute_uses(saved.returned)
            saved.replayed = True
            self._telemetry.stats.bytes_recomputed += saved.nbytes

    def _adopt(self, saved: SavedStorage, recomputed: torch.Tensor) -> bool:
        """Makes a recomputed storage the reload buffer; False where it is not exactly that, on the home stream.

        It was allocated and written on the caller's stream, which is the home. So its order on the home is the program's
        (E3, E4), other streams that ask for it wait for the home (E6, `user`), no copy of it is ever in flight (E5), and
        its memory goes back to the home like that of any other reload buffer.
        """
        storage = recomputed.untyped_storage()
        if self._backend.current_stream() != saved.home or not recomputed.numel() == storage.nbytes() == saved.nbytes:
            return False
        self._backend.allocated_here(recomputed)
        self._telemetry.stats.came_to_device(saved.nbytes)
        saved.returned = recomputed
        saved.user = saved.home
        saved.move_to(RETURNING)
        return True

    def _refuse_if_closed(self, saved: SavedStorage) -> None:
        if self.closed and not saved.on_device:
            raise SwapError(
                f"the manager was closed before backward needed the tensors that {saved.module} saved; "
                f"close it after backward"
            )


def _away_in_tiers(group: Group) -> list[SavedStorage]:
    """Storages of a group whose bytes rest in a tier; a recompute brings the buffers of the others."""
    return [saved for saved in group.living() if saved.state is AWAY and saved.extent is not None]


def _absent_nbytes(saved: SavedStorage) -> int:
    """Bytes of its layer that other parts of the recompute have not given yet, or that are gone again."""
    replayed = (other for other in saved.group.living() if other.replay is not None)
    there = (other for other in replayed if other.replay is saved.replay or not other.lacks_replay)
    return saved.group.replayed_nbytes - sum(other.nbytes for other in there)
