"""D2H side of the engine: issues copies out as storages are saved, and releases their sources one layer later.

It owns the storages that the running operator saves, the groups whose sources are still to be released and the groups whose
copies wait. It does not own the choice of a tier (tier_choice), nor the bytes once they are there.

    forward    layer 0 | layer 1 | layer 2 | ...           next operator's save: compute event -> copies out wait for it
    copies       out 0 |   out 1 |   out 2 |
    released            ^ end of layer 1: compute waits for out 0, then the sources of layer 0 are released

Where a plan's device memory is filled by later layers only, sources whose copies end last stay for one layer more
(`Placement.late_nbytes`): one layer's copies may take longer than the next one runs, if another's take less.

A copy that the device can order (E2, by the device's own events) never stops the forward's host thread. A copy that only a
host thread can wait for, as to a disk behind a GPU without GPUDirect Storage, keeps its source on the device beyond its
layer, up to `late_bytes` in all. Beyond that the thread stops at the end of a layer; that time counts as the disk queue's.
On the CPU the host is the compute stream, and its wait is E2.

Note [A save before its kernel]. Autograd saves an operator's arguments before the operator's kernel runs, and some kernels
write into what was saved so: the noise of `rrelu_with_noise` is one. A copy issued at the save would read memory that
nothing has written yet. So it is issued at the first save of another operator, or at the end of the layer.

Operators are told apart by the number of nodes that autograd has made in this thread: each operator makes its node before it
saves anything, and none of its kernels makes another, since autograd is off below it. So a save at a higher number belongs
to an operator that began when the earlier one, kernels and all, had been issued. A function of the program
(autograd.Function) may make nodes within its own, but saves after its forward: its saves may be taken for those of the last
operator in it, and their copies are issued a save later.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING
from weakref import ref

from memo.errors import StoreWriteError
from memo.events import StallCause
from memo.swap.checksum import checksum
from memo.swap.engine.saved_storage import AWAY, LEAVING, LIVE, by_home
from memo.swap.engine.tier_choice import WhenFull
from memo.swap.kept import is_kept
from memo.torch_private import get_sequence_nr

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from memo.swap.backends.protocol import Backend, Event
    from memo.swap.engine.layer_calls import Group
    from memo.swap.engine.release import Release
    from memo.swap.engine.saved_storage import Hold, SavedStorage
    from memo.swap.engine.stream_order import StreamOrder
    from memo.swap.engine.telemetry import Telemetry
    from memo.swap.engine.tier_choice import TierChoice
    from memo.swap.tiers.tier import Extent

_DRAIN, _DISK_QUEUE = StallCause.DRAIN, StallCause.DISK_QUEUE


class CopyOut:
    """D2H side of an Engine; callers hold the engine lock.

    Args:
        backend: the device and its copy lanes.
        order: orderings between streams.
        tier_choice: reserves each storage its extent.
        release: its limbo counts as late copies, too.
        telemetry: counters and trace.
        verify: sums the bytes of each storage whose copy out is issued.
    """

    def __init__(
        self,
        backend: Backend,
        order: StreamOrder,
        tier_choice: TierChoice,
        release: Release,
        *,
        telemetry: Telemetry,
        verify: bool,
    ) -> None:
        self._backend = backend
        self._order = order
        self._tier_choice = tier_choice
        self._release = release
        self._telemetry = telemetry
        self.late_bytes: int | None = None
        """The most bytes of sources whose copies only the host could wait for; None: those of one layer."""
        self.overlap = True
        """False: a layer's sources are released at its own end."""
        self._verify = verify
        self._being_saved: list[ref[Hold]] = []  # by the operator that saved last
        self._nodes = -1  # number of nodes that autograd had made then
        self._waiting: Group | None = None  # its copies wait until another layer follows
        self._unreleased: collections.deque[Group] = collections.deque()
        self._released: dict[ref[torch.UntypedStorage], int] = {}  # in this forward
        self._late: collections.deque[Group] = collections.deque()  # released but for sources whose copies are late

    def count_held(self) -> None:
        """Updates `peak_held_bytes` by the sources released since the last call that the program still references."""
        held = sum(nbytes for source, nbytes in self._released.items() if source() is not None)
        self._telemetry.stats.peak_held_bytes = max(self._telemetry.stats.peak_held_bytes, held)
        self._released.clear()

    def saves(self, saved: SavedStorage) -> None:
        """Takes a storage that an operator saves now; issues the copies of those that the operators before it have saved.

        Raises:
            HostBudgetExceeded, ScratchFull: no tier has room for one of those; it and later ones stay LIVE.
        """
        nodes = get_sequence_nr()
        if nodes != self._nodes:
            self.send_saved()
            self._nodes = nodes
        self._being_saved.append(saved.hold)

    def send_saved(self) -> None:
        """Issues the copies of what was saved, by operators that have all ended (Note [A save before its kernel])."""
        being_saved, home = self._being_saved, None
        if being_saved:
            self._being_saved = []
            for weak in being_saved:
                hold = weak()
                if hold is not None:
                    saved = hold.saved
                    if saved.home != home:
                        home, written = saved.home, self._order.written(saved.home)  # one event for them all
                    self._send(saved, written)

    def _send(self, saved: SavedStorage, written: Event) -> None:
        """Issues the copy out on the storage's home stream (E1).

        Args:
            saved: a storage with its source, in state LIVE.
            written: an event of the home stream after the operator that saved it.

        Raises:
            HostBudgetExceeded, ScratchFull: no tier has room; the storage stays LIVE.
        """
        source, telemetry = saved.source, self._telemetry
        assert source is not None
        if self._verify:
            with self._backend.stream_context(saved.home):
                saved.sum = checksum(source)
        if saved.replay is not None or not saved.nbytes:  # there is nothing to copy
            saved.move_to(LEAVING)
            self._drop_source(saved)
            return
        if is_kept(source.untyped_storage()):
            telemetry.stats.bytes_kept += saved.nbytes
            return
        extent = self._tier_choice.reserve(saved)
        if extent is None:
            return  # it stays, by plan or for lack of room
        saved.extent = extent
        tier, coded = extent.tier, saved.coded
        if coded is not None:
            with self._backend.stream_context(saved.home):
                telemetry.stats.came_to_device(coded.encode(source, self._backend))
            written = self._order.written(saved.home)
            assert coded.block is not None
            source = coded.block
        if telemetry.trace is None:
            saved.out = tier.write(extent, source, after=written)
        else:
            with telemetry.trace.range(f"{tier.lane_out} {saved.group.module}"):
                saved.out = tier.write(extent, source, after=written)
        telemetry.left(saved, tier.name)
        saved.move_to(LEAVING)
        if telemetry.trace is not None:
            telemetry.trace.copying(saved, tier.lane_out, saved.out)

    def send_living(self, group: Group) -> None:
        """Issues the copies out of a group's storages that are still LIVE."""
        # No list of sources: each is released as soon as its own copy is made, where the device tier makes it.
        waiting = [saved for saved in group.living() if saved.state is LIVE and saved.source is not None]
        for home, there in by_home(waiting).items():
            with self._backend.stream_context(home):
                written = self._order.written(home)  # one event for them all
                for saved in there:
                    self._send(saved, written)

    def drop_recomputed(self, group: Group) -> None:
        """Releases the sources of a group's storages that are recomputed; the others wait for another layer."""
        for saved in group.living():
            if saved.state is LIVE and saved.source is not None and saved.replay is not None:
                saved.move_to(LEAVING)
                self._drop_source(saved)

    def layer_begins(self) -> None:
        """Issues the copies of what was saved before, also those that waited for another layer, which now begins."""
        self.send_saved()
        group, self._waiting = self._waiting, None
        if group is not None:
            group.wait_for_next = False
            self.send_living(group)

    def layer_ended(self, group: Group) -> None:
        """Issues the last copies of `group`, and releases the sources of earlier layers; its own wait for the next end."""
        self.send_saved()
        if group.wait_for_next:
            self._waiting = group
        before = self._unreleased.popleft() if self._unreleased else None
        self._unreleased.append(group)
        if before is not None:
            self._late.append(before)
        if not self.overlap and not group.wait_for_next:
            self._late.append(group)
        self._release_sources(group, longer=self._may_stay_longer(before, group))

    @staticmethod
    def _may_stay_longer(before: Group | None, ended: Group) -> set[SavedStorage]:
        """Sources of the layer before `ended` that its placement gives one layer more: those whose copies end last."""
        found: set[SavedStorage] = set()
        if before is None or before.quota is None or ended.key != (before.key[0] + 1, before.key[1]):
            return found
        room = before.quota.placement.late_nbytes
        for saved in reversed(before.living()):
            if saved.state is LEAVING:
                room -= saved.nbytes + (0 if saved.coded is None else saved.place_nbytes)  # the codes stay as long
                if room < 0:
                    break
                found.add(saved)
        return found

    def release_earlier(self, group: Group) -> None:
        """Releases the sources of the layers before `group`, whose forward is about to end."""
        self._late.extend(self._unreleased)
        self._unreleased.clear()
        self._release_sources(group)

    def _release_sources(self, ended: Group, *, longer: Collection[SavedStorage] = ()) -> None:
        """Releases sources of layers before `ended` but for `longer`, ordered after their copies (E2), oldest first.

        A copy that only the host could wait for is late; its source stays while late sources have room.
        """
        late = 0
        for _ in range(len(self._late)):
            group = self._late.popleft()
            before = late
            sources = [saved for saved in group.living() if saved.state is LEAVING]
            for home, leaving in by_home([saved for saved in sources if saved not in longer]).items():
                ready, stops_host = [], False
                for saved in leaving:
                    if saved.out is not None and self._would_block(saved, saved.out):
                        if late + saved.nbytes <= self._room_for_late(ended):
                            late += saved.nbytes
                            continue
                        stops_host = True
                    ready.append(saved)
                self._drop_sources(ready, home, group.module, stops_host=stops_host)
            if late > before or any(saved in longer for saved in sources):
                self._late.append(group)
        if self._release.has_limbo:
            self._release.clear_limbo(leave=self._room_for_late(ended) - late)

    def _would_block(self, saved: SavedStorage, out: Event) -> bool:
        """True if only the host could wait: for the copy, or to know whether all values could be coded."""
        unchecked = saved.coded is not None and not saved.coded.is_checked
        return unchecked or self._backend.would_block(out)

    def _room_for_late(self, ended: Group) -> int:
        """Returns the bytes of sources that may stay longer than the layer after theirs."""
        if self.late_bytes is not None:
            return self.late_bytes
        return sum(saved.nbytes for saved in ended.living())

    def _drop_sources(self, ready: Sequence[SavedStorage], home: int, module: str, *, stops_host: bool) -> None:
        # The latest copy first: a lane runs its copies in order, so a device that has it waited for has waited for them all.
        began = self._telemetry.begin_wait(home, stops_host=stops_host)
        for saved in reversed(ready):
            self._drop_source(saved)
        self._telemetry.waited(began, _DISK_QUEUE if stops_host else _DRAIN, module, stream=home)

    def _drop_source(self, saved: SavedStorage) -> None:
        try:
            self._order.copied_out(saved)
        except StoreWriteError as error:
            if not self._copy_elsewhere(saved, str(error)):
                raise  # the error in no other frame: a cycle with it would keep this forward's graph, and its failed copies
        coded, stats = saved.coded, self._telemetry.stats
        if coded is not None:
            if saved.state is not LIVE and coded.needs_exact():
                self._copy_exact(saved)
            stats.device_bytes -= coded.drop(stats)
        if saved.state is LIVE:  # no other tier has room, and it may stay
            saved.coded = None
            return
        assert saved.source is not None
        self._released[ref(saved.source.untyped_storage())] = saved.nbytes
        saved.source = None
        stats.device_bytes -= saved.nbytes
        saved.move_to(AWAY)

    def _copy_elsewhere(self, saved: SavedStorage, error: str) -> bool:
        """Copies a storage whose write failed to another tier; False where none has room, with the source still held.

        Where it may stay on the device it does, and is LIVE.
        """
        stats = self._telemetry.stats
        stats.failed_writes += 1
        failed = saved.extent
        assert failed is not None
        assert saved.source is not None
        saved.move_to(LIVE)
        saved.extent = saved.out = None
        failed.tier.release(failed)
        extent = self._tier_choice.reserve_elsewhere(saved, than=failed.tier)
        if extent is None:
            if self._tier_choice.when_full is not WhenFull.STAY:
                return False
            self._tier_choice.stays(saved, saved.nbytes, full=failed.tier.name)
            return True
        self._telemetry.warn("disk-write", f"{error}; the bytes went to the {extent.tier.name} tier instead")
        self._copy_again(saved, extent)
        return True

    def _copy_exact(self, saved: SavedStorage) -> None:
        """Copies a storage as it is, in the place of its codes: a value could not be coded. LIVE where it stays."""
        coded_extent = saved.extent
        assert coded_extent is not None
        extent = self._tier_choice.reserve_exact(saved, like=coded_extent.tier)
        saved.move_to(LIVE)
        self._telemetry.left(saved, coded_extent.tier.name, -1)
        self._telemetry.stats.coded_exact += 1
        coded_extent.tier.release(coded_extent)
        saved.coded = saved.extent = saved.out = None
        if extent is not None:
            self._copy_again(saved, extent)

    def _copy_again(self, saved: SavedStorage, extent: Extent) -> None:
        """Copies a storage, or its codes, to another extent, and orders the home stream after that."""
        source = saved.source
        assert source is not None
        if saved.coded is not None:
            assert saved.coded.block is not None
            source = saved.coded.block
        saved.extent = extent
        saved.out = extent.tier.write(extent, source, after=self._order.written(saved.home))
        self._telemetry.left(saved, extent.tier.name)
        saved.move_to(LEAVING)
        self._order.copied_out(saved)
