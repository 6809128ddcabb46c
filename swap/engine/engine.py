"""Offload engine: copies saved activations off the device in forward and reloads them in backward.

The manager and autograd call it. It owns the lock, and decides whether a saved tensor stays, shares a SavedStorage, or
begins a new one. Other modules own the rest:

    eligibility   tensors that may move                   h2d         reloads, prefetch, recompute
    d2h           copies out, release of their sources    release     storages whose handles are gone
    stream_order  orderings between streams               telemetry   counters, trace events, warnings
    tier_choice   a tier for each storage                 handles     the results of `pack`

It does not own the tiers' memory, the backend's lanes, or the choice of layers (the manager's). The invariant: a buffer is
given up only when every operation that touches it is ordered before the next use of its memory (R5).
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from memo.forks import free_in_child
from memo.swap.engine.coded_copy import CodedCopy, can_code
from memo.swap.engine.d2h import CopyOut
from memo.swap.engine.eligibility import STAYS, Eligibility
from memo.swap.engine.h2d import Reload
from memo.swap.engine.handles import Handle, KeptTensor, Sharded
from memo.swap.engine.layer_calls import LayerCalls
from memo.swap.engine.release import Release
from memo.swap.engine.saved_storage import BACK, UNCHANGED, Hold, SavedStorage, content_of
from memo.swap.engine.spills import SpillFigures, SpillOutcome, Spills
from memo.swap.engine.stream_order import StreamOrder
from memo.swap.engine.telemetry import Telemetry
from memo.swap.engine.tier_choice import TierChoice, WhenFull
from memo.swap.generators import leaves_generators
from memo.swap.tensor_kinds import (
    argument_storages,
    has_hidden_state,
    has_storage,
    is_sharded,
    layer_input,
    local_part,
    parameter_behind,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from torch import nn

    from memo.events import TierName as TierName, Tracer
    from memo.kernels import Codec
    from memo.swap.backends.protocol import Backend
    from memo.swap.engine.handles import Packed
    from memo.swap.engine.layer_calls import Call, Group
    from memo.swap.engine.saved_storage import Content, Geometry, Recompute
    from memo.swap.placement import Placement
    from memo.swap.stats import Stats
    from memo.swap.tiers.tier import Tier

CAPTURED = (
    "a CUDA graph is being captured: tensors saved meanwhile stay on the device, since a replay allocates nothing;"
    " capture parts that fit, or train without graphs"
)
STRIDED = torch.strided
MOST_GEOMETRIES = 10_000  # bounds the cache in a run over ever new sequence lengths


class Engine:
    """Moves one device's saved activations. `pack` and `unpack` are its hooks for autograd.

    Args:
        backend: the device and its copy lanes.
        tiers: destinations, tried in order.
        min_bytes: smaller storages stay on the device.
        when_full: response to a full tier.
        verify: compares by checksums what is saved again with what was copied out.
        codec: format of what moves, INT8 or FP8; None: exact.
        tracer: receives events; None: no trace.
    """

    def __init__(
        self,
        backend: Backend,
        tiers: Sequence[Tier],
        *,
        min_bytes: int,
        when_full: WhenFull = WhenFull.SPILL,
        verify: bool = False,
        codec: Codec | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.backend = backend
        self.tiers = tiers
        # Taken once at a time: a garbage collection inside a locked section may drop handles, whose release then waits for
        # the end of the section. Re-entrant for one reason: it knows whether the calling thread has it.
        self._lock = lock = free_in_child(threading.RLock())
        self._telemetry = telemetry = Telemetry(tracer, backend)
        self._stats = telemetry.stats
        self._layer_calls = layer_calls = LayerCalls()
        self._eligibility = Eligibility(backend.device)
        self._find = self._eligibility.known.find
        order = StreamOrder(backend)
        self._release = release = Release(lock, backend, order, layer_calls=layer_calls, telemetry=telemetry)
        self._on_drop = release.drop  # one bound method, not one for each storage
        self._dropped = release.dropped
        self._here = backend.current_stream
        self._is_capturing = backend.is_capturing
        self._spills = Spills()
        self._tier_choice = TierChoice(
            tiers,
            when_full=when_full,
            stats=self._stats,
            spills=self._spills,
            warn=telemetry.warn,
            make_room=release.clear_limbo,
        )
        self._copy_out = CopyOut(backend, order, self._tier_choice, release, telemetry=telemetry, verify=verify)
        self._reload = Reload(lock, backend, order, release, layer_calls=layer_calls, telemetry=telemetry)
        self._min_bytes = min_bytes
        self.codec = codec
        self._device = backend.device
        self._uint8 = torch.empty(0, dtype=torch.uint8, device=backend.device)
        self._empty_tensors: dict[torch.dtype, torch.Tensor] = {}  # an empty tensor of each dtype
        # Layers repeat, and so do their tensors' geometries: sharing them spares the garbage collector most of its work.
        self._geometries: dict[Geometry, Geometry] = {}

    # Layers. The manager calls these around each layer's forward.

    @property
    def stats(self) -> Stats:
        """Counters since construction, with the times of all waits and recomputes that the device has finished."""
        self._telemetry.settle_times()
        return self._stats

    def keep(self, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """Registers a model's parameters and buffers, whose storages never move."""
        self._eligibility.keep(parameters, buffers)

    def keep_unknown(self) -> None:
        """Has parameters told by their tensors alone, where no model is known: casts of them do not move either."""
        self._eligibility.is_complete = False

    def place(
        self,
        placements: Mapping[int, Placement],
        *,
        rest_bytes: int = 0,
        late_bytes: int | None = None,
        overlap: bool = True,
    ) -> None:
        """Sets the placements of layers from their next calls on; other layers use the tiers in order.

        Args:
            placements: by layer number the fractions of bytes to each tier, of which such a layer tries the first one
                first; replaces all earlier ones.
            rest_bytes: with STAY, bytes that no tier has room for stay on the device while it holds at most this many;
                more of them only if they cannot be recomputed.
            late_bytes: the most bytes of sources that stay on the device because only a host thread can wait for their
                copies out; None: one layer.
            overlap: False: a layer's sources are released at its own end, and it is reloaded where its own backward begins.

        Raises:
            UsageError: a placement sends bytes to a tier that is not there; nothing changes.
        """
        self._tier_choice.place(placements, rest_bytes=rest_bytes)
        self._copy_out.late_bytes = late_bytes
        self._copy_out.overlap = self._reload.overlap = overlap

    def listen(self, tracer: Tracer | None) -> None:
        """Sets the receiver of trace events; None: no trace. Between steps only: saved storages keep their tracer."""
        self._telemetry.listen(tracer)

    def at_layer_boundaries(
        self,
        call: Callable[[str | None], None] | None,
        recompute: Callable[[str | None, bool, int], None] | None = None,
    ) -> None:
        """Registers layer-boundary callbacks; None removes them.

        `call(name)` on entering a layer in forward or backward, `call(None)` on leaving its forward.
        `recompute(name, True, absent)` as the layer's recompute, or a part of it, begins within its backward, and with False
        as it ends; with None as its name for a trial at the end of a layer's forward. Absent are the bytes that other parts
        have not given yet, or have given and that are gone. They run in any thread, and must not block or call the engine.
        """
        self._telemetry.boundary_callback, self._telemetry.recompute_callback = call, recompute

    @contextlib.contextmanager
    def trial(self, group: Group, *, has_room: bool) -> Iterator[None]:
        """Context of a trial recompute at the end of a layer's forward, whose memory belongs to no later step.

        Args:
            group: the layer's saved storages.
            has_room: False releases the sources of the layers before it, as the end of this one would.
        """
        if not has_room:
            with self._lock:
                self._copy_out.release_earlier(group)
        self._telemetry.at_recompute(None, begins=True)
        try:
            yield
        finally:
            self._telemetry.at_recompute(None, begins=False)

    def sample_memory(self, call: Callable[[], None] | None) -> None:
        """Registers a callback that reads the device's memory at each layer boundary; None removes it.

        It runs before that of `at_layer_boundaries`. Any thread; must not block or call the engine.
        """
        self._telemetry.memory_callback = call

    @property
    def entered_layer(self) -> str | None:
        """The layer whose forward or backward was entered last; None after a forward."""
        return self._telemetry.entered

    def saved_on_device(self) -> list[tuple[str, int]]:
        """Lists (module, bytes) of the saved storages that the device holds now."""
        with self._lock:
            return [
                (saved.module, saved.nbytes)
                for group in self._layer_calls
                for saved in group.living()
                if saved.on_device
            ]

    def when_idle(self, call: Callable[[], None]) -> None:
        """Registers a callback for when the last saved storage ends. Any thread; must not block or call the engine."""
        self._release.when_idle = call

    def reload_ahead(self, nbytes: int | None) -> None:
        """Sets the most bytes reloaded ahead of backward; None: one layer."""
        self._reload.prefetch_bytes = nbytes

    def expect(self, order: Sequence[Call]) -> None:
        """Sets the order in which backward will reach the layers' calls, until a step has been observed."""
        self._layer_calls.expect(order)

    def is_captured(self) -> bool:
        """True while the caller's stream is captured into a CUDA graph, in which nothing moves. Warns once."""
        captured = self.backend.is_capturing()
        if captured:
            self._telemetry.warn("capture", CAPTURED)
        return captured

    @leaves_generators
    def begin_forwards(self) -> None:
        """Call before a forward; begins a new step if nothing is saved."""
        self.recover()
        self._telemetry.settle_times()
        if self._stats.live_entries == 0:
            for tier in self.tiers:
                tier.end_step()
            self._layer_calls.end_step()
            if len(self._geometries) > MOST_GEOMETRIES:
                self._geometries.clear()

    def recover(self) -> None:
        """Call before a forward. Where no saved tensor lives none is counted, whatever an interruption has left."""
        self._release.free_lock()
        self._release.end_dropped()
        with self._lock:
            if not self._layer_calls.any_living:
                self._release.clear_limbo()
                for group in self._layer_calls:
                    group.is_lost = True
                self._stats.nothing_lives()

    @leaves_generators
    def begin_layer(
        self,
        layer: int,
        module: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        last: bool,
        modules: Sequence[nn.Module] = (),
    ) -> Group:
        """Begins a layer's forward: tensors saved from now on belong to the group returned.

        Args:
            layer: number of the layer.
            module: its name.
            args: its positional arguments; storages of arguments other than the hidden states stay on the device.
            kwargs: its keyword arguments, likewise.
            last: the layer ends its stack, so its copies out wait until another layer follows.
            modules: that run in it; memory that their parameters have only meanwhile, gathered by FSDP, stays.
        """
        self._telemetry.at_layer_boundary(module)
        with self._lock:
            self._copy_out.layer_begins()
            group = self._layer_calls.begin(layer, module, wait_for_next=last)
            group.external = argument_storages(args, kwargs)
            group.modules = modules
            if self.codec is not None:
                hidden = layer_input(args, kwargs)
                group.hidden_values = 0 if hidden is None else local_part(hidden).numel()
            group.quota = self._tier_choice.quota(layer)
            if self.when_full is WhenFull.STAY and not last:
                group.may_lack_room = self._tier_choice.may_lack_room(layer)
            self._layer_calls.open = group
            if last:
                self._reload.prefetch_first()
            trace = self._telemetry.trace
            if trace is not None:
                trace.backward_left()
                group.began = trace.begin(f"forward {module}")
        return group

    @leaves_generators
    def end_layer(self, group: Group, *, between: bool) -> None:
        """Ends a layer's forward, after its return or exception.

        Args:
            group: its saved storages.
            between: another layer of the stack follows; tensors saved until then (a checkpoint's input) join `group`.
        """
        with self._lock:
            group.external, group.modules = set(), ()
            self._layer_calls.open = group if between else None
            self._spills.layer_ended(group)
            if self._telemetry.trace is not None and group.began is not None:
                self._telemetry.trace.forward_ended(group.module, group.began)
            self._copy_out.layer_ended(group)
        self._release.end_dropped()
        self._telemetry.at_layer_boundary(None)

    def saved_as(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """Returns the record of a storage that autograd saved; None where it stays or is unknown."""
        return self._eligibility.saved_as(storage)

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """True for a storage that never moves: small, a parameter's or buffer's, or found to be such at a save."""
        return storage.nbytes() < self._min_bytes or self._find(ref(storage)) is STAYS

    def copy_out_held(self, group: Group, replays: Mapping[SavedStorage, Recompute]) -> None:
        """Copies out a held group's storages, but for those with a replay, which gives them in backward."""
        with self._lock:
            group.held = False
            for saved in group.living():
                saved.replay = replays.get(saved)
                if replays:
                    saved.coded = None  # replays read it
            group.together = any(replay.together for replay in replays.values())
            group.replayed_nbytes = sum(saved.nbytes for saved in replays)
            if not group.wait_for_next:
                self._copy_out.send_living(group)
            elif self.when_full is WhenFull.STAY or not self._layer_calls.may_come_next(group):
                self._copy_out.drop_recomputed(group)

    @property
    def when_full(self) -> WhenFull:
        """Response to a full tier."""
        return self._tier_choice.when_full

    def has_room_for(self, group: Group, *, calls: int) -> bool:
        """True where so many calls, each of which saves as much as a held group, have room by sums alone."""
        with self._lock:
            return self._tier_choice.has_room_for(group, calls=calls)

    def lacking_nbytes(self, group: Group, replays: Mapping[SavedStorage, Recompute], *, besides: Sequence[int]) -> int:
        """Bytes of a held group that move and find no room now; 0: all do.

        Args:
            group: the group.
            replays: those of its storages that do not move.
            besides: sizes of blocks that must have room too; not with STAY.
        """
        with self._lock:
            moving = [saved for saved in group.living() if saved not in replays]
            sizes = [(saved.nbytes, saved.nbytes if replays else saved.place_nbytes) for saved in moving]
            return self._tier_choice.lacking_nbytes(group, sizes, besides=besides)

    def recomputes_for_room(self, group: Group, lacking_nbytes: int) -> None:
        """Counts a held group's layer as recomputed whole, since `lacking_nbytes` of it found no room."""
        with self._lock:
            self._tier_choice.recomputes(group, lacking_nbytes)

    def take_lacking(self) -> dict[TierName, int]:
        """Bytes since the last call that no tier had room for, by the tier that was to have them.

        They stayed on the device, or their layer was recomputed whole.
        """
        with self._lock:
            return self._spills.take_lacking()

    @leaves_generators
    def end_forwards(self) -> None:
        """Call after a forward; tensors saved later stay on the device."""
        with self._lock:
            self._layer_calls.open = None
            self._copy_out.send_saved()
            self._copy_out.count_held()
        self._release.end_dropped()

    # Hooks of autograd.

    @leaves_generators
    def pack(self, tensor: torch.Tensor, content: Content | None = None) -> Packed:
        """Hook for each tensor that autograd saves; the copy out of a storage seen for the first time follows soon.

        Args:
            tensor: any tensor; one that must not move (R3) is kept by reference.
            content: what its storage holds, where the tensor itself does not count its changes.

        Raises:
            HostBudgetExceeded, ScratchFull: no tier has room; what was saved before stays valid.
            ModifiedAfterSave: with `verify`, its storage was copied out with other bytes.
        """
        group = self._layer_calls.open
        kind = type(tensor)
        if group is None or kind is Parameter or (self._is_capturing() and self.is_captured()):
            return KeptTensor(tensor)
        if kind is not Tensor or tensor.layout is not STRIDED:
            return self._pack_other(tensor)
        storage = tensor.untyped_storage()
        known = self._find(ref(storage))
        if known is STAYS:
            return KeptTensor(tensor)
        with self._lock:
            hold = None if known is None else known()
            if hold is not None and has_hidden_state(tensor):
                return KeptTensor(tensor)  # it reads the same bytes in another way
            if content is None:
                content = content_of(tensor) if tensor._version else UNCHANGED
            if hold is not None and hold.saved.content == content:
                if hold.saved.coded is not None and hold.saved.coded.dtype is not tensor.dtype:
                    return KeptTensor(tensor)  # the codes are of values of another type
                if hold.saved.sum is not None:
                    hold.saved.verify(tensor)
                self._stats.deduplicated += 1
                if hold.saved.home != self._here():  # its memory must outlive the work of this stream, too
                    self.backend.compute_uses(tensor, writes=False)
            else:
                if hold is None and known is not None:
                    self._release.clear_limbo_of(storage)
                nbytes = storage.nbytes()
                if nbytes < self._min_bytes or self._eligibility.stays(tensor, storage, nbytes, group):
                    return KeptTensor(tensor)
                hold = self._begin_storage(tensor, storage, nbytes, group, content=content)
            self._stats.packed += 1
        if self._dropped:
            self._release.end_dropped()
        dtype = tensor.dtype
        empty = self._empty_tensors.get(dtype)
        if empty is None:
            empty = self._empty_tensors[dtype] = torch.empty(0, dtype=dtype, device=self._device)
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
        return Handle(tensor, hold, self._geometries.setdefault(geometry, geometry), empty)

    def _pack_other(self, tensor: torch.Tensor) -> Packed:
        """Packs a parameter, sparse tensor or subclass: all stay but the local part of a DTensor."""
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return KeptTensor(tensor)
        local = local_part(tensor)
        if local is tensor or parameter_behind(tensor) is not None:
            return KeptTensor(tensor)
        group = self._layer_calls.open
        if group is not None and not group.modules and tensor.grad_fn is None:
            return KeptTensor(tensor)  # perhaps a frozen parameter's, whose memory FSDP frees: nothing here tells
        # Changes of a sharded tensor are counted there and not at its local part.
        packed = self.pack(local.detach(), content_of(tensor))
        if not is_sharded(tensor):
            return packed
        assert not isinstance(packed, Sharded)
        return Sharded(tensor, packed)

    @leaves_generators
    def unpack(self, handle: Packed, *, by_backward: bool = True) -> torch.Tensor:
        """Hook for each tensor that backward needs; may be called again for the same handle.

        Args:
            handle: a result of `pack`.
            by_backward: False for a recompute, whose reads do not tell where backward is.

        Returns:
            A tensor of the saved one's bytes, dtype, offset, size and stride. The caller's stream is ordered after all
            that writes it.

        Raises:
            ModifiedAfterSave: the tensor was changed in place after it was saved (R4).
            SwapError: its reload failed, or the engine is closed; the handle stays valid.
        """
        if type(handle) is KeptTensor:
            if handle.tensor._version != handle.version:
                raise handle.modified()
            if not by_backward:
                self.recompute_reads([local_part(handle.tensor)])
            return handle.tensor
        if type(handle) is Sharded:
            if handle.guard._version != handle.version:
                raise handle.modified()
            return handle.rebuild(self.unpack(handle.local, by_backward=by_backward))
        assert type(handle) is Handle
        if handle.guard._version != handle.version:
            raise handle.modified()
        saved, reload = handle.hold.saved, self._reload
        try:
            if by_backward and saved.group.together and saved.group is not self._layer_calls.reading:
                self._reload.recompute_together(saved.group)
            if by_backward and saved.readers:
                reload.recompute_readers(saved)
            while True:
                with self._lock:
                    if saved.replay is None or not saved.lacks_replay:
                        if by_backward and saved.group is not self._layer_calls.reading and not reload.closed:
                            reload.reach(saved.group)
                        if saved.state is not BACK:
                            reload.bring(saved)
                        elif saved.user != self._here():
                            reload.hand_over(saved)
                        buffer = saved.source
                        if buffer is None:
                            buffer = saved.returned
                            assert buffer is not None
                            self.backend.compute_uses(buffer, writes=False)
                        elif not by_backward:  # on a stream that the program may not have used it on
                            self.backend.compute_uses(buffer, writes=False)
                        break
                # Not under the lock: its results may be gone again when we have the lock, and are then asked for once more.
                reload.recompute(saved)
        finally:  # also after an error: nobody else would end what was dropped meanwhile
            if self._dropped:
                self._release.end_dropped()
        # Inductor asserts the exact offset, size and stride. A backward that writes into it is counted at the saved tensor.
        offset, size, stride = handle.geometry
        found = handle.guard.detach()
        found.data = handle.guard.new().set_(buffer.untyped_storage(), offset, size, stride)
        return found

    def recompute_reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declares that a recompute reads tensors, maybe on a stream that the program did not use them on."""
        for tensor in tensors:
            if tensor.device == self._device and has_storage(tensor):
                self.backend.compute_uses(tensor, writes=False)

    def _begin_storage(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int, group: Group, *, content: Content
    ) -> Hold:
        """Begins the life of a storage."""
        telemetry, stats = self._telemetry, self._stats
        source: torch.Tensor = self._uint8.new(storage)  # all of its bytes; keeps them alive
        home = self.backend.saving_stream(source)
        saved = SavedStorage(source, nbytes, content, group, home, self._on_drop, telemetry.changed)
        hold = Hold(saved)
        if self.codec is not None and can_code(tensor, nbytes, group.hidden_values):
            saved.coded = CodedCopy(self.codec, tensor.dtype)
        self._eligibility.known[storage] = weak = saved.hold
        stats.began(nbytes)  # first: what an interruption cuts off here is counted out by its finalizer
        group.alive += 1
        group.saved.append(weak)
        group.nbytes += nbytes
        stats.came_to_device(nbytes)
        if telemetry.trace is not None:
            telemetry.trace.changed(saved, tensor)
        if not group.wait_for_next and not group.held:
            self._copy_out.saves(saved)
        return hold

    # Ends.

    def spills(self, step: int) -> Mapping[SpillOutcome, SpillFigures]:
        """What tiers had no room for so far, by what became of it. `step` is that under way."""
        with self._lock:
            return self._spills.figures(step)

    def end_step(self, step: int | None = None) -> None:
        """Call at the end of a training step, with its number, or without one to emit the trace's spans in between."""
        self._release.end_dropped()
        if step is not None and self._spills.is_spilling:
            with self._lock:
                spilled, trace = self._spills.end_step(step), self._telemetry.trace
            if trace is not None:
                for layer in spilled:
                    trace.noted("spill", str(layer), layer.module)
        self._telemetry.settle_times()
        if self._telemetry.trace is not None:
            self._telemetry.trace.end_step()

    def settle_times(self) -> None:
        """Waits for the device until `stats` has the times of all waits and recomputes."""
        self._telemetry.settle_times(wait=True)

    def close(self) -> None:
        """Waits until no copy is in flight, then closes tiers and lanes. Later reloads raise SwapError. Idempotent."""
        if self._reload.closed:
            return
        self._release.end_dropped()
        try:
            if self._telemetry.trace is not None:
                self._telemetry.trace.finish()
        finally:  # a device that has failed ends no span
            with self._lock:
                self._reload.closed = True
                self._release.clear_limbo()
            for tier in self.tiers:
                tier.close()
            self.backend.close()
