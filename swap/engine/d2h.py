"""D2H side of the engine: issues copies out as storages are saved, and releases their sources one layer later.

It owns which groups have sources still to be released, and the groups whose copies wait. It does not own the choice of a
tier (destinations), nor the bytes once they are there.

    forward    layer 0 | layer 1 | layer 2 | ...           pack: compute event -> copy out waits for it
    copies       out 0 |   out 1 |   out 2 |
    dropped             ^ end of layer 1: compute waits for out 0, then the sources of layer 0 go

A copy that the device can order (E2, by the device's own events) never stops the forward's host thread. One that only a
host thread can wait for, as to a disk behind a GPU without GPUDirect Storage, leaves its source on the device beyond its
layer, up to `late_bytes` in all; the thread stops at a layer's end only for what is beyond that, and the time is counted as
the disk queue's. On the CPU the host is the compute stream, and waiting is what E2 is.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from memo.errors import StoreWriteError
from memo.events import StallCause, Tier as TierName
from memo.swap.engine.saved_storage import AWAY, LEAVING, LIVE, by_home
from memo.swap.engine.token_prefix import gather

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memo.swap.backends.protocol import Backend, Event
    from memo.swap.engine.release import Release
    from memo.swap.engine.saved_storage import Group, SavedStorage
    from memo.swap.engine.stream_order import StreamOrder
    from memo.swap.engine.telemetry import Telemetry
    from memo.swap.engine.tier_choice import TierChoice

__all__ = ["CopyOut"]

_DEVICE = TierName.DEVICE
_DRAIN, _DISK_QUEUE = StallCause.DRAIN, StallCause.DISK_QUEUE


class CopyOut:
    """D2H side of an Engine, whose lock is held around every call. `late_bytes` None means the bytes of one layer."""

    def __init__(
        self,
        backend: Backend,
        edges: StreamOrder,
        destinations: TierChoice,
        endings: Release,
        *,
        account: Telemetry,
        late_bytes: int | None,
    ) -> None:
        self._backend = backend
        self._order = edges
        self._tier_choice = destinations
        self._release = endings
        self._telemetry = account
        self._late_bytes = late_bytes
        self._held: Group | None = None  # its copies wait until another layer follows
        self._unretired: collections.deque[Group] = collections.deque()
        self._late: collections.deque[Group] = collections.deque()  # retired but for sources whose copies are late

    def send(self, saved: SavedStorage, written: Event | None = None) -> None:
        """Issues the copy out, on the storage's home stream (E1); `written` is an event of it since the save."""
        part, source = saved.part, saved.source
        assert source is not None
        nbytes = saved.nbytes if part is None else part.head_nbytes
        if nbytes == 0:  # all of it will be computed again
            saved.move_to(LEAVING)
            self._drop_source(saved)
            return
        place = self._tier_choice.claim(saved, nbytes)
        if place is None:
            return  # it stays, by plan
        saved.place = place
        if part is not None:
            self._gather([saved])
            source = part.leaving(source)
        tier = place.tier
        with self._telemetry.issuing(tier.lane_out, saved.module):
            saved.out = place.leave(source, after=written or self._order.written(saved.home))
        self._telemetry.stats.moved(tier.name, nbytes)
        saved.move_to(LEAVING)
        if tier.name is _DEVICE and not _is_shared(saved):
            self._drop_source(saved)  # the compute stream made the copy, so whatever it does next comes after
        elif tier.name is not _DEVICE and self._telemetry.journal is not None:
            self._telemetry.journal.copying(saved.id, nbytes, tier.lane_out, saved.out)

    def send_living(self, group: Group) -> None:
        """Issues the copies of what a group has saved and not yet sent."""
        # No list of sources: each goes when its own copy is made, where the device makes it.
        waiting = [saved for saved in group.living() if saved.state is LIVE and saved.source is not None]
        for home, there in by_home(waiting).items():
            with self._backend.stream_context(home):
                self._gather(there)
                written = self._order.written(home)  # one event for them all
                for saved in there:
                    self.send(saved, written)

    def _gather(self, waiting: Iterable[SavedStorage]) -> None:
        """Packs the moving tokens where they are not contiguous; the packs stay until their sources are released."""
        parts = [
            (saved.part, saved.source)
            for saved in waiting
            if saved.part is not None and saved.part.must_gather and saved.source is not None
        ]
        self._telemetry.stats.came_to_device(gather(parts, self._backend))

    def layer_begins(self) -> None:
        """Another layer follows the one whose copies were held back: they are worth making after all."""
        group, self._held = self._held, None
        if group is not None:
            group.wait_for_next = False
            self.send_living(group)

    def layer_ended(self, group: Group) -> None:
        """The sources of the layers before it go; its own wait for the next one's end."""
        if group.wait_for_next:
            self._held = group
        self._unretired.append(group)
        while len(self._unretired) > 1:
            self._late.append(self._unretired.popleft())
        self._retire(group)

    def _retire(self, ended: Group) -> None:
        """Drops the sources of layers before `ended`, ordered after their copies (E2), oldest first.

        A copy that only the host could wait for is late; its source stays while there is room for late ones.
        """
        late = 0
        for _ in range(len(self._late)):
            group = self._late.popleft()
            before = late
            for home, leaving in by_home(saved for saved in group.living() if saved.state is LEAVING).items():
                going, stops_host = [], False
                for saved in leaving:
                    if saved.out is not None and self._backend.would_block(saved.out):
                        if not _is_shared(saved) and late + saved.nbytes <= self._room_for_late(ended):
                            late += saved.nbytes
                            continue
                        stops_host = True
                    going.append(saved)
                self._drop_sources(going, home, group.module, stops_host=stops_host)
            if late > before:
                self._late.append(group)
        if self._release.has_limbo:
            self._release.clear_limbo(leave=self._room_for_late(ended) - late)

    def _room_for_late(self, ended: Group) -> int:
        """Bytes that may stay longer than the layer after theirs."""
        if self._late_bytes is not None:
            return self._late_bytes
        return sum(saved.nbytes for saved in ended.living())

    def _drop_sources(self, going: Iterable[SavedStorage], home: int, module: str, *, stops_host: bool) -> None:
        began = self._telemetry.begin_wait(home, stops_host=stops_host)
        for saved in going:
            self._drop_source(saved)
        self._telemetry.waited(began, _DISK_QUEUE if stops_host else _DRAIN, module, stream=home)

    def _drop_source(self, saved: SavedStorage) -> None:
        try:
            self._order.copied_out(saved)
        except StoreWriteError as error:
            self._rescue(saved, error)
        saved.source = None
        if saved.part is not None:
            self._telemetry.stats.device_bytes -= saved.part.left()
        self._telemetry.stats.device_bytes -= saved.nbytes
        saved.move_to(AWAY)

    def _rescue(self, saved: SavedStorage, error: StoreWriteError) -> None:
        """A write failed while its source is still here: the bytes go to another tier, or the error goes up."""
        stats = self._telemetry.stats
        stats.failed_writes += 1
        failed = saved.place
        assert failed is not None
        assert saved.source is not None
        saved.move_to(LIVE)
        saved.place = saved.out = None
        failed.release()
        nbytes = saved.moving_nbytes
        place = self._tier_choice.claim_elsewhere(nbytes, than=failed.tier)
        if place is None:
            raise error
        self._telemetry.warn("disk-write", f"{error}; the bytes went to the {place.tier.name} tier instead")
        saved.place = place
        source = saved.source if saved.part is None else saved.part.leaving(saved.source)
        saved.out = place.leave(source, after=self._order.written(saved.home))
        stats.moved(place.tier.name, nbytes)
        saved.move_to(LEAVING)
        self._order.copied_out(saved)


def _is_shared(saved: SavedStorage) -> bool:
    """True for what a recompute with collectives gives back. Its source is released at the same layer's end on all ranks,
    whichever tier had room and however far its copy is: where the source is still there nothing is recomputed."""
    return saved.part is not None and saved.part.call.together
