"""The swap engine: moves what autograd saved out of the device in forward and back in backward.

The manager and autograd call it. It owns the lock, and decides whether a saved tensor stays, shares a storage that is saved
already, or begins the life of a new one. The rest has owners of its own:

    eligibility   which tensors may move                  h2d         reloads, prefetch, recompute
    d2h           copies out, release of their sources    release     of storages whose handles are gone
    stream_order  the orderings between streams           telemetry   counters, trace events, warnings

It does not own memory kinds (tiers), lanes (backend), or the choice of layers (the manager). One invariant holds it
together: a buffer is given up only when every operation that touches it is ordered before whatever may use its memory
next (R5).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import ref

import torch

from memo.swap.engine.d2h import CopyOut
from memo.swap.engine.eligibility import STAYS, Eligibility
from memo.swap.engine.h2d import Reload
from memo.swap.engine.layer_calls import LayerCalls
from memo.swap.engine.release import Release
from memo.swap.engine.saved_storage import BACK, Geometry, Group, Handle, Hold, Kept, SavedStorage, Sharded, content_of
from memo.swap.engine.stream_order import StreamOrder
from memo.swap.engine.telemetry import Telemetry
from memo.swap.engine.tier_choice import TierChoice
from memo.swap.tensor_kinds import argument_storages, has_hidden_state, has_storage, is_sharded, local_part
from memo.swap.tiers.device import DeviceTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from memo.events import Tracer
    from memo.swap.backends.protocol import Backend
    from memo.swap.engine.layer_calls import Call
    from memo.swap.engine.saved_storage import Content
    from memo.swap.engine.token_prefix import TokenPrefix
    from memo.swap.placement import Placement
    from memo.swap.stats import Stats
    from memo.swap.tiers.host_and_disk import Tier as TierRoom

__all__ = ["Engine"]

CAPTURED = (
    "a CUDA graph is being captured: what autograd saves meanwhile stays on the device, since a graph repeats its work"
    " without asking for memory; capture parts that fit, or train without graphs"
)
MOST_GEOMETRIES = 10_000  # a run over ever new sequence lengths must not remember them all


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
        # Not re-entrant on purpose: a garbage collection inside a locked section may drop handles, and their release then
        # waits for the section to end.
        self._lock = lock = threading.Lock()
        self._telemetry = account = Telemetry(tracer, backend)
        self._stats = account.stats
        self._groups = groups = LayerCalls()
        self._eligibility = Eligibility(backend.device)
        self._find = self._eligibility.known.find
        edges = StreamOrder(backend)
        self._release = endings = Release(lock, backend, edges, groups=groups, account=account)
        self._dropping = endings.drop  # one bound method, not one for each storage
        self._dropped = endings.dropped
        self._here = backend.current_stream
        self._is_capturing = backend.is_capturing
        self._tier_choice = TierChoice(
            tiers, DeviceTier(backend, self._stats), spill=spill, stats=self._stats, make_room=endings.clear_limbo
        )
        self._copy_out = CopyOut(backend, edges, self._tier_choice, endings, account=account, late_bytes=late_bytes)
        self._reload = Reload(
            lock, backend, edges, endings, groups=groups, account=account, prefetch_bytes=prefetch_bytes
        )
        self._min_bytes = min_bytes
        self._device = backend.device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=backend.device)
        self._nothing: dict[torch.dtype, torch.Tensor] = {}  # an empty tensor of each type
        # Layers repeat, and so do their tensors' geometries: one object each spares the garbage collector most of its work.
        self._geometries: dict[Geometry, Geometry] = {}
        self.place(placements or {})

    # Layers. The manager calls these around each layer's forward.

    @property
    def stats(self) -> Stats:
        """Counters since construction, with the times of what the device is through with."""
        self._telemetry.settle_times()
        return self._stats

    def keep(self, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """Names a model's parameters and buffers, whose storages never move."""
        self._eligibility.keep(parameters, buffers)

    def place(self, placements: Mapping[int, Placement], *, rest_bytes: int = 0) -> None:
        """Sets the layers' placements, by layer, from their next calls on; other layers use the tiers in order.

        Bytes that no tier has room for stay on the device while it holds no more than `rest_bytes`.

        Raises:
            UsageError: a placement sends bytes to a tier that is not there; nothing changes.
        """
        self._tier_choice.place(placements, rest_bytes=rest_bytes)

    def listen(self, tracer: Tracer | None) -> None:
        """Sends events to `tracer` from now on, None to nobody. Between steps only: saved storages keep their tracer."""
        self._telemetry.listen(tracer)

    def at_edges(self, call: Callable[[str | None], None] | None) -> None:
        """Registers a layer-boundary callback: `call(name)` on entering a layer in forward or backward, `call(None)` on
        leaving its forward. Runs in any thread; must not block or call the engine."""
        self._telemetry.at_edge = call

    def when_idle(self, call: Callable[[], None]) -> None:
        """Registers a callback for when nothing is saved any more. Runs in any thread; must not block or call the engine."""
        self._release.when_idle = call

    def reload_ahead(self, nbytes: int | None) -> None:
        """Sets how many bytes may be reloaded ahead of backward; None for one layer."""
        self._reload.prefetch_bytes = nbytes

    def expect(self, order: Sequence[Call]) -> None:
        """Sets the order in which backward will reach the layers' calls, until a step has shown it."""
        self._groups.expect(order)

    def is_captured(self) -> bool:
        """True while the caller's stream is captured into a CUDA graph; nothing moves then. Warns once."""
        captured = self.backend.is_capturing()
        if captured:
            self._telemetry.warn("capture", CAPTURED)
        return captured

    def begin_forwards(self) -> None:
        """Before a forward: starts a new order if nothing is alive."""
        self._release.drain()
        self._telemetry.settle_times()
        if self._stats.live_entries == 0:
            with self._lock:
                self._release.clear_limbo()
            for tier in self.tiers:
                tier.end_step()
            self._groups.end_step()
            if len(self._geometries) > MOST_GEOMETRIES:
                self._geometries.clear()

    def begin_layer(
        self, layer: int, module: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, last: bool
    ) -> Group:
        """A layer's forward begins: what is saved from now on belongs to it."""
        self._telemetry.comes_to_edge(module)
        with self._lock:
            self._copy_out.layer_begins()
            group = self._groups.begin(layer, module, wait_for_next=last)
            group.external = argument_storages(args, kwargs)
            group.quota = self._tier_choice.quota(layer)
            self._groups.open = group
            if last:
                self._reload.look_ahead()
            journal = self._telemetry.journal
            if journal is not None:
                journal.backward_left()
                group.began = journal.begin(f"forward {module}")
        return group

    def end_layer(self, group: Group, *, between: bool) -> None:
        """A layer's forward has ended, by return or by exception.

        `between` says that another layer of the stack follows: what is saved until then (a checkpoint's input) belongs to
        this group still.
        """
        with self._lock:
            group.external = set()
            self._groups.open = group if between else None
            if self._telemetry.journal is not None and group.began is not None:
                self._telemetry.journal.forward_ended(group.module, group.began)
            self._copy_out.layer_ended(group)
        self._release.drain()
        self._telemetry.comes_to_edge(None)

    def saved_as(self, storage: torch.UntypedStorage) -> SavedStorage | None:
        """The record of a storage that autograd saved; None where it stays or is unknown."""
        return self._eligibility.saved_as(storage)

    def settle(self, group: Group, parts: Mapping[SavedStorage, TokenPrefix]) -> None:
        """Sends a held group's storages: the first tokens of those in `parts`, all of the others."""
        with self._lock:
            group.held = False
            for saved in group.living():
                saved.part = parts.get(saved)
            if not group.wait_for_next:
                self._copy_out.send_living(group)

    def has_room(self, group: Group, parts: Mapping[SavedStorage, TokenPrefix], *, besides: Sequence[int]) -> bool:
        """True if all that a held group is to move, and blocks of the sizes in `besides`, fit into the tiers now.

        Finds out by claiming room, which it gives back at once.
        """
        with self._lock:
            sizes = [saved.nbytes if saved not in parts else parts[saved].head_nbytes for saved in group.living()]
            return self._tier_choice.fit(sizes, group.quota, besides=besides)

    def end_forwards(self) -> None:
        """After a forward: nothing that is saved later moves."""
        self._groups.open = None
        self._release.drain()

    # What autograd calls.

    def pack(self, tensor: torch.Tensor, content: Content | None = None) -> Handle | Kept | Sharded:
        """Called by autograd for each tensor it saves; issues the copy out of a storage seen for the first time.

        `content` is what the storage holds, where the tensor itself does not count its changes.
        """
        group = self._groups.open
        kind = type(tensor)
        if group is None or kind is torch.nn.Parameter or (self._is_capturing() and self.is_captured()):
            return Kept(tensor)
        if kind is not torch.Tensor or tensor.layout is not torch.strided:
            return self._pack_other(tensor)
        storage = tensor.untyped_storage()
        known = self._find(ref(storage))
        if known is STAYS:
            return Kept(tensor)
        with self._lock:
            hold = None if known is None else known()
            if hold is not None and has_hidden_state(tensor):
                return Kept(tensor)  # it reads the storage's bytes in another way
            if content is None:
                content = content_of(tensor)
            if hold is not None and hold.saved.content == content:
                self._stats.deduplicated += 1
                if hold.saved.home != self._here():  # its memory must outlive what this stream does with it, too
                    self.backend.compute_uses(tensor, writes=False)
            else:
                if hold is None and known is not None:
                    self._release.clear_limbo_of(storage)
                nbytes = storage.nbytes()
                if nbytes < self._min_bytes or self._eligibility.stays(tensor, storage, nbytes, group):
                    return Kept(tensor)
                hold = self._take(tensor, storage, nbytes, group, content=content)
            self._stats.packed += 1
        if self._dropped:
            self._release.drain()
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
        # What changes a sharded tensor counts there and not at its local part.
        packed = self.pack(local.detach(), content_of(tensor))
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
        saved = handle.hold.saved
        here = self._here()
        try:
            while True:
                with self._lock:
                    part = saved.part
                    if part is None or saved.source is not None or part.filled:
                        if by_backward and saved.group is not self._groups.reading and not self._reload.closed:
                            self._reload.reach(saved.group)
                        if saved.state is not BACK:
                            self._reload.bring(saved)
                        elif saved.user != here:
                            self._reload.hand_over(saved)
                        buffer = saved.source
                        if buffer is None:
                            buffer = saved.returned
                            assert buffer is not None
                            self.backend.compute_uses(buffer, writes=False)
                        elif not by_backward:  # on a stream that the program may not have used it on
                            self.backend.compute_uses(buffer, writes=False)
                        break
                # Not under the lock: what it gives may be gone again when we have the lock, and is then asked for once more.
                self._reload.recompute(saved, part)
        finally:  # also after an error: what was dropped meanwhile waits for nobody else
            if self._dropped:
                self._release.drain()
        # Inductor asserts the exact offset, size and stride.
        offset, size, stride = handle.geometry
        return handle.guard.new().set_(buffer.untyped_storage(), offset, size, stride)

    def recompute_reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """A recompute reads these, maybe on a stream that the program did not use them on."""
        for tensor in tensors:
            if tensor.device == self._device and has_storage(tensor):
                self.backend.compute_uses(tensor, writes=False)

    def _take(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int, group: Group, *, content: Content
    ) -> Hold:
        """The life of a storage begins."""
        account = self._telemetry
        source: torch.Tensor = self._bytes.new(storage)  # all of its bytes, and keeps them alive
        home = self.backend.saving_stream(source)
        saved = SavedStorage(source, nbytes, content, group, home, self._dropping, account.changed)
        hold = Hold(saved)
        self._eligibility.known[storage] = weak = saved.hold
        group.saved.append(weak)
        group.alive += 1
        account.stats.live_entries += 1
        account.stats.came_to_device(nbytes)
        if account.journal is not None:
            account.journal.changed(saved, tensor)
        if not group.wait_for_next and not group.held:
            self._copy_out.send(saved)
        return hold

    # Ends.

    def end_step(self) -> None:
        """Ends a training step: sends the trace its events."""
        self._release.drain()
        self._telemetry.settle_times()
        if self._telemetry.journal is not None:
            self._telemetry.journal.end_step()

    def settle_times(self) -> None:
        """Waits for the device where times of waits and recomputes are still to come, so that `stats` has them all."""
        self._telemetry.settle_times(wait=True)

    def close(self) -> None:
        """Waits until no copy is in flight, then closes tiers and lanes. What is still saved can no longer come back."""
        if self._reload.closed:
            return
        self._release.drain()
        with self._lock:
            self._reload.closed = True
            self._release.clear_limbo()
        for tier in self.tiers:
            tier.close()
        self.backend.close()
