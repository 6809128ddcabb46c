"""The swap engine: moves what autograd saved out of the device in forward and back in backward.

It owns the order of copies and the lifetimes of buffers. It does not own memory kinds (tiers), lanes (backend), or the
choice of layers (the manager). One invariant holds it together: a buffer is given up only when every operation that
touches it is ordered before whatever may use its memory next (R5).

    forward    layer 0 | layer 1 | layer 2 | ...           pack: compute event -> copy out waits for it
    copies       out 0 |   out 1 |   out 2 |
    dropped             ^ end of layer 1: compute waits for out 0, then the sources of layer 0 go

    backward   ... | layer 2 | layer 1 | layer 0           first unpack of layer 2: reload 1 while 2 computes
    reloads        |    in 1 |    in 0 |                   unpack: compute waits for the reload it needs

Every ordering between streams is one of these edges; the checking backend proves each of them necessary.

    E1  copy out waits for the compute event taken at pack
    E2  compute waits for the copy out before its source is dropped
    E3  reload waits for the compute event taken when its buffer was allocated
    E4  compute waits for the reload before autograd sees the buffer
    E5  a buffer whose copy is in flight when its last handle dies stays in limbo until that copy is done

What the forward promises its host thread: a copy that the device can order (E2, by the device's own events) never stops it.
A copy that only a host thread can wait for, as to a disk behind a GPU without GPUDirect Storage, leaves its source on the
device beyond its layer, up to `late_bytes` in all; the thread stops at a layer's end only for what is beyond that, and the
time is counted as the disk queue's. On the CPU the host is the compute stream, and waiting is what E2 is.
"""

from __future__ import annotations

import collections
import threading
import time
import warnings
from typing import TYPE_CHECKING
from weakref import ref

import torch

from memo.errors import StoreWriteError, SwapError
from memo.swap.capture import argument_storages, cast_of_parameter, is_sharded, local_part, never_moves
from memo.swap.destinations import Destinations
from memo.swap.groups import Groups
from memo.swap.identity import Identities
from memo.swap.journal import Journal
from memo.swap.kept import DeviceTier
from memo.swap.saved import (
    AWAY,
    BACK,
    GONE,
    LEAVING,
    LIVE,
    RETURNING,
    Geometry,
    Group,
    Handle,
    Hold,
    Kept,
    SavedStorage,
    Sharded,
)
from memo.swap.stats import Stats
from memo.trace.events import StallCause, UseKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from memo.swap.backend import Backend, Event
    from memo.swap.groups import Call
    from memo.swap.partial import Partial
    from memo.swap.placement import Placement
    from memo.swap.replay import Span, Wanted
    from memo.swap.tiers import Tier as TierRoom
    from memo.trace.events import Tracer

__all__ = ["Engine"]

SHORTEST_STALL_NS = 20_000  # shorter ones are the engine's own work
MOST_GEOMETRIES = 10_000  # a run over ever new sequence lengths must not remember them all
_DRAIN, _DISK_QUEUE, _RELOAD = StallCause.DRAIN, StallCause.DISK_QUEUE, StallCause.RELOAD
_LIVE, _PREFETCHED, _FETCHED = UseKind.LIVE, UseKind.PREFETCHED, UseKind.FETCHED
_KEEP = object()  # what the identity map holds for a storage that never moves


class Engine:
    """One device's saved tensors.

    `tiers` are tried in order; a layer named in `placements` first tries the one that its placement says. `prefetch_bytes`
    bounds how much may be reloaded ahead of backward; None means one layer. `late_bytes` bounds how much may stay on the
    device beyond its time because its copy out is late and only a host thread could wait for it; None means one layer.
    """

    def __init__(
        self,
        backend: Backend,
        tiers: Sequence[TierRoom],
        *,
        min_bytes: int,
        spill: bool = True,
        prefetch_bytes: int | None = None,
        late_bytes: int | None = None,
        placements: Mapping[int, Placement] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.backend = backend
        self.tiers = tiers
        self.stats = Stats()
        self._min_bytes = min_bytes
        self._on_device = DeviceTier(backend, self.stats)
        self._destinations = Destinations(
            tiers, self._on_device, spill=spill, stats=self.stats, make_room=self._clear_limbo
        )
        self._prefetch_bytes = prefetch_bytes
        self._late_bytes = late_bytes
        self._journal = None if tracer is None else Journal(tracer, backend.stamp)
        self._changed = None if self._journal is None else self._journal.changed
        self._dropping = self._drop  # one bound method, not one for each storage
        self._device = backend.device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=backend.device)
        self._nothing: dict[torch.dtype, torch.Tensor] = {}  # an empty tensor of each type
        # Layers repeat, and so do their tensors' geometries: one object each spares the garbage collector most of its work.
        self._geometries: dict[Geometry, Geometry] = {}
        self._known = Identities()  # storage -> its life, held weakly, or _KEEP
        self._groups = Groups()
        self._open: Group | None = None
        self._held: Group | None = None  # the group whose copies wait until another layer follows
        self._unretired: collections.deque[Group] = collections.deque()
        self._late: collections.deque[Group] = collections.deque()  # retired but for sources whose copies are late
        self._reading: Group | None = None
        self._limbo: collections.deque[SavedStorage] = collections.deque()
        self._dropped: collections.deque[SavedStorage] = collections.deque()
        # Not re-entrant on purpose: a garbage collection inside a locked section may drop handles, and their release then
        # waits for the section to end.
        self._lock = threading.Lock()
        # How many elements each parameter has, and of which types: a cast of one has as many, of another type.
        self._parameter_types: dict[int, set[torch.dtype]] = {}
        # Some are DTensors. What a layer makes of one has a size of its own, and data parallelism frees its memory under us.
        self._sharded = False
        self._warned: set[str] = set()
        self._closed = False
        self.place(placements or {})

    # Layers. The manager calls these around each layer's forward.

    def keep(self, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """Names a model's parameters and buffers, whose storages never move.

        What replaces them later is found again by looking at the tensors themselves; this is the quick way.
        """
        for tensor in (*parameters, *buffers):
            if isinstance(tensor, torch.nn.Parameter):
                self._parameter_types.setdefault(tensor.numel(), set()).add(tensor.dtype)
                self._sharded = self._sharded or is_sharded(tensor)
            local = local_part(tensor)
            if type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout is torch.strided:
                self._known[local.untyped_storage()] = _KEEP

    def place(self, placements: Mapping[int, Placement]) -> None:
        """Says where the layers' bytes go, by layer, from their next calls on; other layers use the tiers in order.

        Raises:
            UsageError: a placement sends bytes to a tier that is not there; nothing changes.
        """
        self._destinations.place(placements)

    def listen(self, tracer: Tracer | None) -> None:
        """From now on `tracer` is told what happens. Between steps only: what is saved already tells nobody else."""
        self._journal = None if tracer is None else Journal(tracer, self.backend.stamp)
        self._changed = None if self._journal is None else self._journal.changed

    def reload_ahead(self, nbytes: int | None) -> None:
        """How much may be reloaded ahead of backward; None for one layer."""
        self._prefetch_bytes = nbytes

    def expect(self, order: Sequence[Call]) -> None:
        """Says in which order backward will come to the layers' calls, until a step has shown it."""
        self._groups.expect(order)

    def begin_forwards(self) -> None:
        """Before a forward: starts a new order if nothing is alive."""
        self._drain()
        if self.stats.live_entries == 0:
            with self._lock:
                self._clear_limbo()
            for tier in self.tiers:
                tier.end_step()
            self._groups.end_step()
            self._reading = None
            if len(self._geometries) > MOST_GEOMETRIES:
                self._geometries.clear()

    def begin_layer(
        self, layer: int, module: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, last: bool
    ) -> Group:
        """A layer's forward begins: what is saved from now on belongs to it."""
        with self._lock:
            self._issue_held()
            group = self._groups.begin(layer, module, wait_for_next=last)
            group.external = argument_storages(args, kwargs)
            group.quota = self._destinations.quota(layer)
            self._open = group
            if self._journal is not None:
                self._journal.backward_left()
                group.began = self._journal.stamp()
        return group

    def end_layer(self, group: Group, *, between: bool) -> None:
        """A layer's forward has ended, by return or by exception.

        `between` says that another layer of the stack follows: what is saved until then (a checkpoint's input) belongs to
        this group still.
        """
        with self._lock:
            group.external = set()
            self._open = group if between else None
            if self._journal is not None and group.began is not None:
                self._journal.forward_ended(group.module, group.began)
            if group.wait_for_next:
                self._held = group
            self._unretired.append(group)
            while len(self._unretired) > 1:
                self._late.append(self._unretired.popleft())
            self._retire(group)
        self._drain()

    def saved_as(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """The life of a storage that autograd saved."""
        known = self._known.find(ref(storage))
        hold: Hold | None = None if known is None or known is _KEEP else known()
        return None if hold is None else hold.saved

    def settle(self, group: Group, parts: Mapping[SavedStorage, Partial]) -> None:
        """It is known what of a held group's storages moves: the first tokens of those in `parts`, all of the others."""
        with self._lock:
            group.held = False
            for saved in group.living():
                saved.part = parts.get(saved)
                if saved.state is LIVE and saved.source is not None and not group.wait_for_next:
                    self._send(saved, saved.source)

    def has_room(self, group: Group, parts: Mapping[SavedStorage, Partial], *, besides: Sequence[int]) -> bool:
        """Whether all that a held group is to move, and blocks of as many bytes as `besides` says, fit into the tiers now.

        What it takes to know is given back at once.
        """
        with self._lock:
            sizes = [saved.nbytes if saved not in parts else parts[saved].head_nbytes for saved in group.living()]
            return self._destinations.fit(sizes, group.quota, besides=besides)

    def end_forwards(self) -> None:
        """After a forward: nothing that is saved later moves."""
        self._open = None
        self._drain()

    # What autograd calls.

    def pack(self, tensor: torch.Tensor) -> Handle | Kept | Sharded:
        """Called by autograd for each tensor it saves; issues the copy out of a storage seen for the first time."""
        group = self._open
        kind = type(tensor)
        if group is None or kind is torch.nn.Parameter:
            return Kept(tensor)
        if kind is not torch.Tensor or tensor.layout is not torch.strided:
            return self._pack_other(tensor)
        storage = tensor.untyped_storage()
        known = self._known.find(ref(storage))
        if known is _KEEP:
            return Kept(tensor)
        with self._lock:
            hold = None if known is None else known()
            if hold is not None and hold.saved.version == tensor._version:
                self.stats.deduplicated += 1
            else:
                if hold is None and known is not None:
                    self._clear_limbo_of(storage)
                nbytes = storage.nbytes()
                if nbytes < self._min_bytes or self._stays(tensor, storage, nbytes, group):
                    return Kept(tensor)
                hold = self._take(tensor, storage, nbytes, group)
            self.stats.packed += 1
        if self._dropped:
            self._drain()
        nothing = self._nothing.get(tensor.dtype)
        if nothing is None:
            nothing = self._nothing[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device=self._device)
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
        return Handle(tensor, hold, self._geometries.setdefault(geometry, geometry), nothing)

    def _pack_other(self, tensor: torch.Tensor) -> Handle | Kept | Sharded:
        """Parameters, sparse tensors and most subclasses stay; of a DTensor the local part moves."""
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return Kept(tensor)
        local = local_part(tensor)
        if local is tensor:
            return Kept(tensor)
        packed = self.pack(local.detach())
        if not is_sharded(tensor):
            return packed
        assert not isinstance(packed, Sharded)
        return Sharded(tensor, packed)

    def unpack(self, handle: Handle | Kept | Sharded, *, by_backward: bool = True) -> torch.Tensor:
        """Called by autograd when backward needs a tensor; may be called again for the same handle.

        A recompute asks too, which says nothing of where backward is: `by_backward` is then false.
        """
        if type(handle) is Kept:
            if handle.tensor._version != handle.version:
                raise handle.modified()
            return handle.tensor
        if type(handle) is Sharded:
            return handle.rebuild(self.unpack(handle.local, by_backward=by_backward))
        assert type(handle) is Handle
        if handle.guard._version != handle.version:
            raise handle.modified()
        saved = handle.hold.saved
        while True:
            with self._lock:
                part = saved.part
                if part is None or saved.source is not None or part.filled:
                    if by_backward and saved.group is not self._reading and not self._closed:
                        self._reach(saved.group)
                    if saved.state is not BACK:
                        self._bring(saved)
                    buffer = saved.source
                    if buffer is None:
                        buffer = saved.returned
                        assert buffer is not None
                        self.backend.compute_uses(buffer)
                    break
            # Not under the lock: what it gives may be gone again when we have the lock, and is then asked for once more.
            self._recompute(saved, part)
        if self._dropped:
            self._drain()
        # Inductor asserts the exact offset, size and stride.
        offset, size, stride = handle.geometry
        return handle.guard.new().set_(buffer.untyped_storage(), offset, size, stride)

    # Out of the device.

    def _stays(self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int, group: Group) -> bool:
        """Whether this storage never moves (R3); if so it is not looked at again."""
        if not (storage in group.external or tensor.device != self._device or never_moves(tensor)):
            types = self._parameter_types.get(nbytes // tensor.itemsize)
            seldom = types is None or types == {tensor.dtype}
            if (seldom and not self._sharded) or not cast_of_parameter(tensor):
                return False
        self._known[storage] = _KEEP
        return True

    def _take(self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int, group: Group) -> Hold:
        """The life of a storage begins."""
        source: torch.Tensor = self._bytes.new(storage)  # all of its bytes, and keeps them alive
        saved = SavedStorage(source, nbytes, tensor._version, group, self._dropping, self._changed)
        hold = Hold(saved)
        self._known[storage] = weak = saved.hold
        group.saved.append(weak)
        group.alive += 1
        self.stats.live_entries += 1
        self.stats.came_to_device(nbytes)
        if self._journal is not None:
            self._journal.changed(saved, tensor)
        if not group.wait_for_next and not group.held:
            self._send(saved, source)
        return hold

    def _send(self, saved: SavedStorage, source: torch.Tensor) -> None:
        """Issues the copy out (E1)."""
        part = saved.part
        nbytes = saved.nbytes if part is None else part.head_nbytes
        if nbytes == 0:  # all of it will be computed again
            saved.move_to(LEAVING)
            self._drop_source(saved)
            return
        place = self._destinations.claim(saved, nbytes)
        if place is None:
            return  # it stays, by plan
        saved.place = place
        if part is not None:
            source = part.leaving(source, self.backend)
        saved.out = place.leave(source, after=self._written())
        self.stats.moved(place.tier.name, nbytes)
        saved.move_to(LEAVING)
        if place.tier is self._on_device:
            self._drop_source(saved)  # the compute stream made the copy, so whatever it does next comes after
        elif self._journal is not None:
            self._journal.copying(saved.id, nbytes, place.tier.lane_out, saved.out)

    def _issue_held(self) -> None:
        """Another layer follows the one whose copies were held back: they are worth making after all."""
        group, self._held = self._held, None
        if group is not None:
            group.wait_for_next = False
            for saved in group.living():
                if saved.state is LIVE and saved.source is not None:
                    self._send(saved, saved.source)

    def _retire(self, ended: Group) -> None:
        """Drops the sources of layers before `ended`, ordered after their copies (E2), oldest first.

        A copy that only the host could wait for is late; its source stays while there is room for late ones.
        """
        late = 0
        for _ in range(len(self._late)):
            group = self._late.popleft()
            begin, cause, before = time.monotonic_ns(), _DRAIN, late
            for saved in group.living():
                if saved.state is not LEAVING:
                    continue
                if saved.out is not None and self.backend.host_waits(saved.out):
                    if late + saved.nbytes <= self._room_for_late(ended):
                        late += saved.nbytes
                        continue
                    cause = _DISK_QUEUE
                self._drop_source(saved)
            self._waited(begin, cause, group.module)
            if late > before:
                self._late.append(group)
        if self._limbo:
            self._clear_limbo(leave=self._room_for_late(ended) - late)

    def _room_for_late(self, ended: Group) -> int:
        """Bytes that may stay longer than the layer after theirs."""
        if self._late_bytes is not None:
            return self._late_bytes
        return sum(saved.nbytes for saved in ended.living())

    def _drop_source(self, saved: SavedStorage) -> None:
        try:
            self._copied_out(saved)
        except StoreWriteError as error:
            self._rescue(saved, error)
        saved.source = None
        if saved.part is not None:
            saved.part.outgoing = None
        self.stats.device_bytes -= saved.nbytes
        saved.move_to(AWAY)

    def _rescue(self, saved: SavedStorage, error: StoreWriteError) -> None:
        """A write failed while its source is still here: the bytes go to another tier, or the error goes up."""
        self.stats.failed_writes += 1
        failed = saved.place
        assert failed is not None
        assert saved.source is not None
        saved.move_to(LIVE)
        saved.place = saved.out = None
        failed.release()
        nbytes = saved.moving_nbytes
        place = self._destinations.claim_elsewhere(nbytes, than=failed.tier)
        if place is None:
            raise error
        self._warn("disk-write", f"{error}; the bytes went to the {place.tier.name} tier instead")
        saved.place = place
        source = saved.source if saved.part is None else saved.part.leaving(saved.source, self.backend)
        saved.out = place.leave(source, after=self._written())
        self.stats.moved(place.tier.name, nbytes)
        saved.move_to(LEAVING)
        self._copied_out(saved)

    # Back to the device.

    def _bring(self, saved: SavedStorage) -> None:
        """Backward asks for a storage for the first time since its forward."""
        if saved.source is not None:
            self._forward(saved)
            return
        how = _PREFETCHED
        if saved.state is AWAY:
            self._refuse_if_closed(saved)
            how = _FETCHED
            self._fetch([saved])
        begin = time.monotonic_ns()
        try:
            self._copied_back(saved)
        except SwapError:
            saved.returned = saved.returning = None
            if saved.part is not None:
                saved.part.forget()
            self.stats.device_bytes -= saved.nbytes
            saved.move_to(AWAY)
            raise
        finally:
            self._waited(begin, _RELOAD, saved.group.module, saved.id)
        if saved.part is not None:
            assert saved.returned is not None
            saved.part.returned(saved.returned, self.backend)
        saved.move_to(BACK)
        self._count_use(saved, how)

    def _forward(self, saved: SavedStorage) -> None:
        """Backward came before the source was dropped: it gets the source, and a copy that has not begun is undone."""
        if saved.state is LEAVING and saved.out is not None:
            assert saved.place is not None
            if saved.out.cancel():
                self.stats.cancelled += 1
                self.stats.moved(saved.place.tier.name, -saved.moving_nbytes)
                saved.place.release()
                saved.place = saved.out = None
                saved.move_to(LIVE)
        self.stats.bytes_forwarded += saved.nbytes
        self._count_use(saved, _LIVE)

    def _fetch(self, wanted: Sequence[SavedStorage]) -> None:
        """Allocates buffers on the compute stream and issues the reloads into them, all after one event (E3).

        Raises:
            torch.OutOfMemoryError: there was no room for all of them; those that got a buffer are on their way.
        """
        buffers: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        try:
            for saved in wanted:
                buffer = self.backend.empty(saved.nbytes)
                targets.append(buffer if saved.part is None else saved.part.returning(buffer, self.backend))
                buffers.append(buffer)
        finally:
            if buffers:
                event = self._allocated()
                for saved, buffer, target in zip(wanted, buffers, targets, strict=False):
                    self._reload(saved, buffer, target, event)

    def _reload(self, saved: SavedStorage, buffer: torch.Tensor, target: torch.Tensor, event: Event) -> None:
        stats = self.stats
        place = saved.place
        if place is not None:  # None where all of it is computed again
            nbytes = saved.nbytes if saved.part is None else saved.part.head_nbytes
            saved.returning = place.enter(target, after=event)
            if place.tier is not self._on_device:
                stats.bytes_reloaded += nbytes
                if self._journal is not None:
                    self._journal.copying(saved.id, nbytes, place.tier.lane_in, saved.returning)
        saved.returned = buffer
        stats.came_to_device(saved.nbytes)
        saved.move_to(RETURNING)

    def _recompute(self, saved: SavedStorage, part: Partial) -> None:
        """Computes again what no tier has of `saved` and its layer's other storages, while their first tokens arrive."""
        with self._lock:
            self._refuse_if_closed(saved)
            if saved.group is not self._reading and not self._closed:
                self._reach(saved.group)
            if saved.state is AWAY:
                self._fetch([saved])
        begin = time.monotonic_ns()
        began = None if self._journal is None else self._journal.stamp()
        part.call.recompute(self._fill)
        self.stats.recompute_s += (time.monotonic_ns() - begin) / 1e9
        if self._journal is not None and began is not None:
            self._journal.recompute_ended(saved.module, began)
        if not part.filled and saved.source is None:
            raise AssertionError(f"the recompute of {saved.module} did not give saved storage {saved.id}")

    def _fill(self, span: Span, wanted: Wanted, tail: torch.Tensor) -> None:
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
            self.stats.bytes_recomputed += saved.part.fill(saved.returned, tail, span, self.backend)

    def _refuse_if_closed(self, saved: SavedStorage) -> None:
        if self._closed and not saved.on_device:
            raise SwapError(f"the manager was closed before backward asked for what {saved.module} saved")

    def _reach(self, group: Group) -> None:
        """Backward has come to this group: reload it, and what the expected order says comes after it (R7)."""
        self._reading = group
        self._groups.reached(group)
        if self._journal is not None:
            self._journal.backward_reached(group.module)
        self._poll_limbo()
        if not self._fetch_group(group, [saved for saved in group.living() if saved.state is AWAY]):
            return
        room = self._prefetch_bytes
        for ahead, following in enumerate(self._groups.after(group)):
            # Of what nothing has to be brought from another tier there is nothing to do before backward asks for it.
            away = [saved for saved in following.living() if saved.state is AWAY and self._is_elsewhere(saved)]
            nbytes = sum(saved.nbytes for saved in away)
            if ahead and (room is None or nbytes > room):  # one layer ahead is what overlap needs in any case
                break
            if not self._fetch_group(following, away):
                break
            room = None if room is None else room - nbytes

    def _is_elsewhere(self, saved: SavedStorage) -> bool:
        return saved.place is not None and saved.place.tier is not self._on_device

    def _fetch_group(self, group: Group, away: Sequence[SavedStorage]) -> bool:
        """Reloads what the group has away; False when the device had no room for all of it.

        What is not reloaded here is fetched when backward asks for it, when less is held than now.
        """
        try:
            self._fetch(away[::-1])  # backward asks in about this order
        except torch.OutOfMemoryError:
            self._warn("prefetch", f"no device memory to reload {group.module} ahead; reloading on demand")
            return False
        return True

    # The end of a life.

    def _drop(self, saved: SavedStorage) -> None:
        """The last handle of a storage is gone. May run in any thread, also inside this engine's own locked sections."""
        if self._lock.acquire(blocking=False):
            try:
                self._end(saved)
            finally:
                self._lock.release()
        else:
            self._dropped.append(saved)
        # Whoever has the lock may have let go of it between the two lines above.
        if self._dropped:
            self._drain()

    def _drain(self) -> None:
        """Ends what was dropped, now or, where the lock is taken, when whoever has it drains."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._end_dropped()
            finally:
                self._lock.release()

    def _end_dropped(self) -> None:
        while self._dropped:
            self._end(self._dropped.popleft())

    def _end(self, saved: SavedStorage) -> None:
        self.stats.live_entries -= 1
        group = saved.group
        group.alive -= 1
        if not group.alive and group is not self._open:
            self._groups.forget(group)
            if group is self._reading and self._journal is not None:
                self._journal.backward_left()
        if self._in_flight(saved) is None:
            self._free(saved)
        elif saved.state is LEAVING and saved.out is not None and saved.out.cancel():
            assert saved.place is not None
            self.stats.cancelled += 1
            self.stats.moved(saved.place.tier.name, -saved.moving_nbytes)
            self._free(saved)
        else:
            self._limbo.append(saved)  # E5

    def _clear_limbo(self, *, leave: int = 0) -> None:
        """Frees what a copy had kept back. The compute stream waits rather than the host, as in E2.

        Where only the host could wait, up to `leave` bytes stay.
        """
        for _ in range(len(self._limbo)):
            saved = self._limbo.popleft()
            event = self._in_flight(saved)
            if event is not None:
                if saved.nbytes <= leave and self.backend.host_waits(event):
                    leave -= saved.nbytes
                    self._limbo.append(saved)
                    continue
                begin = time.monotonic_ns()
                try:
                    self.backend.compute_wait(event)
                except SwapError as error:
                    # Nobody needs these bytes any more; the failure itself must still be seen.
                    self._warn("dropped-copy", f"{error} (nothing was lost: the tensor was no longer needed)")
                self._waited(begin, _DRAIN, saved.module, saved.id)
            self._free(saved)

    def _clear_limbo_of(self, storage: torch.UntypedStorage) -> None:
        """A storage is saved again whose handles are gone: what was on its way for them must not count twice."""
        self._end_dropped()
        if any(old.source is not None and old.source.untyped_storage() is storage for old in self._limbo):
            self._clear_limbo()

    def _poll_limbo(self) -> None:
        """Frees what is done already; waits for nothing."""
        for _ in range(len(self._limbo)):
            saved = self._limbo.popleft()
            if self._in_flight(saved) is None:
                self._free(saved)
            else:
                self._limbo.append(saved)

    def _free(self, saved: SavedStorage) -> None:
        if saved.source is not None or saved.returned is not None:
            self.stats.device_bytes -= saved.nbytes
        saved.source = saved.returned = None
        if saved.part is not None:
            saved.part.outgoing = None
            saved.part.forget()
        if saved.place is not None:
            saved.place.release()
            saved.place = None
        saved.move_to(GONE)

    # The ordering edges, one method each.

    def _written(self) -> Event:
        """E1: what the compute stream has issued so far, the saved tensor's kernel among it."""
        return self.backend.compute_event()

    def _copied_out(self, saved: SavedStorage) -> None:
        """E2: what the compute stream issues from now on runs after the copy out, so the source's memory is free."""
        if saved.out is not None:
            self.backend.compute_wait(saved.out)

    def _allocated(self) -> Event:
        """E3: earlier work of the compute stream may still use the memory that a fresh buffer was made of."""
        return self.backend.compute_event()

    def _copied_back(self, saved: SavedStorage) -> None:
        """E4: what the compute stream issues from now on runs after the reload."""
        if saved.returning is not None:
            self.backend.compute_wait(saved.returning)

    def _in_flight(self, saved: SavedStorage) -> Event | None:
        """E5: the copy that may still touch the buffers of a storage whose handles are gone."""
        if saved.state is LEAVING:
            event = saved.out
        elif saved.state is RETURNING:
            event = saved.returning
        else:
            return None
        return None if event is None or event.query() else event

    # Waiting, counting, telling.

    def _waited(self, begin_ns: int, cause: StallCause, module: str, ident: int | None = None) -> None:
        """Host time since `begin_ns` may have gone into waiting for a copy."""
        duration = time.monotonic_ns() - begin_ns
        if duration < SHORTEST_STALL_NS:
            return
        self.stats.stalls_ns[cause] += duration
        if self._journal is not None:
            self._journal.stalled(begin_ns, duration, cause, module, ident)

    def _count_use(self, saved: SavedStorage, how: UseKind) -> None:
        self.stats.uses[how] += 1
        if self._journal is not None:
            self._journal.used(saved, how)

    def _warn(self, cause: str, message: str) -> None:
        if self._journal is not None:
            self._journal.noted(cause, message)
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def end_step(self) -> None:
        """A training step is over: what it did can be told."""
        self._drain()
        if self._journal is not None:
            self._journal.end_step()

    def close(self) -> None:
        """Waits until no copy is in flight, then closes tiers and lanes. What is still saved can no longer come back."""
        if self._closed:
            return
        self._drain()
        with self._lock:
            self._closed = True
            self._clear_limbo()
        for tier in self.tiers:
            tier.close()
        self.backend.close()
