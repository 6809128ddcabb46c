"""Successor of `torch.autograd.graph.save_on_cpu` whose copies overlap with compute: one file over torch, to propose there.

    offload = save_on_cpu_overlapped(32 << 30, keep=model.buffers())
    for batch in data:
        with offload:                    # around the forward; backward may run outside
            loss = model(batch).loss
        loss.backward()

Run as a script, it trains a small transformer with and without it and compares the bits; on a GPU also step time and peak,
with those of `save_on_cpu(pin_memory=True)`. memo does not use this file; its engine adds disk, recompute and plans.

    stream out       wait (1), copy 1 | copy 2 ...
    compute stream   op 1 | op 2 | wait (2), free 1 | op 3 ...      backward: wait (4) | op 2 | wait (4) | op 1
    stream in                                                       wait (3), copy 2 in | copy 1 in, ahead of time

(1) A copy out starts after the operator that saves the tensor. It is issued at the next operator's save, since autograd
    saves arguments before the kernel runs, and some kernels write into one: `F.rrelu` into its noise.
(2) The compute stream waits for a copy out before the source is freed, so the memory's next owner writes after the copy has
    read it. With `record_stream` that memory would be free at a time that nobody knows.
(3) A copy in starts after the earlier work of the stream that allocated its buffer, which may still use that memory.
(4) The stream that asks for a tensor waits for its copy in. (5) Host memory is written again after the copy in that read it.

Limits: one device; no CUDA graphs; changes that torch does not count (`.data`, NumPy) are not seen; Tensor subclasses stay.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from argparse import ArgumentParser, Namespace
from bisect import bisect, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

ALIGNMENT = 256  # bytes, of places in host memory
CASTS = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0"}


class save_on_cpu_overlapped(saved_tensors_hooks):
    """Context manager that moves the tensors that autograd saves to pinned host memory while compute goes on.

    Gradients have the bits of a run without it. One object serves any number of forwards, in any thread.

    Args:
        host_bytes: host memory, pinned at the first copy until the object is gone. What finds no place stays on the device.
        min_bytes: smaller storages stay on the device.
        window_bytes: the most device memory of sources whose copies out may be under way, of reloads ahead of backward, and
            of reloads that backward has read and may read again; of each as much.
        keep: tensors that never move, such as a model's buffers. Parameters, their casts and leaves that require gradients
            stay in any case.
        device: the device whose tensors move: the current GPU, or where there is none the CPU, which copies at once.
    """

    def __init__(
        self, host_bytes: int, *, min_bytes: int = 64 << 10, window_bytes: int = 256 << 20, keep: Iterable[Tensor] = (),
        device: torch.device | str | None = None
    ) -> None:  # fmt: skip
        device = torch.empty(
            0, device=device or ("cuda" if torch.cuda.is_available() else "cpu")
        ).device  # with its index
        self._engine = _Engine(_Link(device), host_bytes, max(min_bytes, 1), window_bytes, keep)
        self.stats = self._engine.stats
        super().__init__(self._engine.pack, self._engine.unpack)

    def __enter__(self) -> save_on_cpu_overlapped:  # type: ignore[override]
        super().__enter__()
        self._engine.thread.latest.append(None)
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._engine.end()


@dataclass(kw_only=True)
class Stats:
    """Counters of one context manager."""

    copies_out: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_stayed: int = 0  # of storages that found no host memory
    shared: int = 0  # saved tensors in an earlier one's storage
    live: int = 0  # storages now saved
    device_bytes: int = 0  # of their sources and reloads
    host_bytes: int = 0  # of their places
    host_bytes_peak: int = 0


class _Link:
    """Streams and copies between one device and host memory. Without a GPU all streams and events are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.out: Any = torch.cuda.Stream(device) if self.is_cuda else None
        self.back: Any = torch.cuda.Stream(device) if self.is_cuda else None

    def here(self) -> Any:
        return torch.cuda.current_stream(self.device) if self.is_cuda else None

    def wait(self, stream: Any, event: Any) -> None:
        if event is not None:
            stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor, stream: Any, *, after: Any) -> Any:
        """Copies on a side stream after all that the stream `after` has been given; returns an event at the end."""
        if stream is not None:
            stream.wait_stream(after)
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
        return None if stream is None else stream.record_event()

    def host_memory(self, nbytes: int) -> Tensor:
        """Pins exactly `nbytes`; torch's own pinned memory comes in powers of two."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self.is_cuda:
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0))
            if code:
                raise RuntimeError(f"save_on_cpu_overlapped cannot pin {nbytes} bytes of host memory: error {code}")
            weakref.finalize(memory, _unpin, memory.data_ptr(), self.out, self.back).atexit = False
        return memory


def _unpin(address: int, *streams: torch.cuda.Stream) -> None:
    for stream in streams:
        stream.synchronize()  # copies of graphs that are gone
    torch.cuda.cudart().cudaHostUnregister(address)


class _HostMemory:
    """Places in one block of host memory, first fit. The block is made for the first of them."""

    def __init__(self, link: _Link, nbytes: int) -> None:
        self._link = link
        self._nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self._block: Tensor | None = None
        self._gaps = [(0, self._nbytes)]  # begin and end of each, in order

    def take(self, nbytes: int) -> Tensor | None:
        """Returns a place of at least `nbytes`; None where no gap is large enough."""
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for index, (begin, end) in enumerate(self._gaps):
            if nbytes <= end - begin:
                if self._block is None:
                    self._block = self._link.host_memory(self._nbytes)
                self._gaps[index] = begin + nbytes, end
                return self._block[begin : begin + nbytes]
        return None

    def give_back(self, place: Tensor) -> None:
        """Frees a place, and joins it with the gaps around it."""
        begin, end = int(place.storage_offset()), int(place.storage_offset()) + place.numel()
        index = bisect(self._gaps, (begin, end))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == begin:
            begin = self._gaps.pop(index - 1)[0]
        insort(self._gaps, (begin, end))


@dataclass(eq=False, slots=True, kw_only=True)
class _Saved:
    """One storage with one content, while the graph has a tensor on it.

    | it is             | source | place | returned |
    |-------------------|--------|-------|----------|
    | saved, or stays   | set    |       |          |
    | leaving           | set    | set   |          |
    | away              |        | set   |          |
    | returning or back |        | set   | set      |
    """

    nbytes: int
    home: Any  # stream that saved it; its memory is freed there, and its reload allocated
    source: Any  # these three are a tensor or None
    place: Any = None
    returned: Any = None
    left: Any = None  # event at the end of the copy out
    arrived: Any = None  # event at the end of the copy in
    before: _Saved | None = None  # the one that left before it in the same `with` block


@dataclass(eq=False)
class _Share:
    """Life of a _Saved: handles refer to it, and nothing else does."""

    saved: _Saved


class _Handle:
    """A saved tensor: a detached alias that sees its version, and has no memory where the storage may move."""

    def __init__(self, tensor: Tensor, share: _Share | None = None) -> None:
        self.share = share
        self.alias = tensor.detach()  # the tensor itself would keep its own graph
        self.version = tensor._version
        if share is not None:
            self.geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
            self.alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


class _Thread(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.latest: list[_Saved | None] = [None]  # that left, outside of `with` blocks and in each open one
        self.being_saved: list[_Saved] = []  # by the running operator
        self.nodes = -1  # made by autograd by then


class _Engine:
    """The hooks, with their state under one lock."""

    def __init__(self, link: _Link, host_bytes: int, min_bytes: int, window_bytes: int, keep: Iterable[Tensor]) -> None:
        self.stats = Stats()
        self._link = link
        self._host = _HostMemory(link, host_bytes)
        self._min_bytes, self._window_bytes = min_bytes, window_bytes
        self._keep = weakref.WeakSet([tensor.untyped_storage() for tensor in keep])
        # By storage object: addresses are used again within a step.
        self._known: weakref.WeakKeyDictionary[Any, tuple[Any, weakref.ref[_Share]]] = weakref.WeakKeyDictionary()
        self._windows: list[dict[_Saved, int]] = [{}, {}, {}]  # with their bytes, the oldest first
        self._leaving, self._ahead, self._read = self._windows
        self.thread = _Thread()
        self._lock = threading.Lock()
        self._dropped: deque[_Saved] = deque()  # the last handle is gone

    def end(self) -> None:
        with self._locked():
            self._send_saved()
        self.thread.latest.pop()

    def pack(self, tensor: Tensor) -> _Handle:
        """Hook for each tensor that autograd saves."""
        if not self._moves(tensor):
            return _Handle(tensor)
        storage, here, thread = tensor.untyped_storage(), self._link.here(), self.thread
        with self._locked():
            nodes = torch._C._autograd._get_sequence_nr()  # each operator makes its node before it saves
            if nodes != thread.nodes:
                self._send_saved()
                thread.nodes = nodes
            content = _content(tensor)
            known, share_of = self._known.get(storage, (None, None))
            share = share_of() if share_of is not None and known == content else None
            if share is None:
                share = self._begin_storage(storage, here)
                self._known[storage] = content, weakref.ref(share)
            else:
                self.stats.shared += 1
                if share.saved.home != here:  # its memory may be free before backward
                    tensor.record_stream(here)
        return _Handle(tensor, share)

    def unpack(self, handle: _Handle) -> Tensor:
        """Hook for each tensor that backward needs; may be called again."""
        alias = handle.alias
        if alias._version != handle.version:  # torch itself checks no tensor that has hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: it was"
                f" saved at version {handle.version} and is at version {alias._version}"
            )
        if handle.share is None:
            return alias
        with self._locked():
            self._send_saved()
            found = self._bring(handle.share.saved)
        result = alias.detach()  # with the version counter: a backward that writes into it is seen
        result.data = torch.empty_like(alias).set_(found.untyped_storage(), *handle.geometry)
        return result

    def _moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._link.device:
            return False
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad) or _is_cast_of_parameter(tensor):
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._is_zerotensor():
            return False  # bytes and strides do not describe it
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._min_bytes and storage not in self._keep

    def _begin_storage(self, storage: torch.UntypedStorage, here: Any) -> _Share:
        source = torch.empty(0, dtype=torch.uint8, device=self._link.device).set_(storage)
        saved = _Saved(nbytes=storage.nbytes(), home=here, source=source)
        self.thread.being_saved.append(saved)
        self.stats.live += 1
        self.stats.device_bytes += saved.nbytes
        share = _Share(saved)
        weakref.finalize(share, self._drop, saved).atexit = False
        return share

    def _send_saved(self) -> None:
        """Sends what this thread's operators have saved; they have all been issued."""
        thread, stats = self.thread, self.stats
        being_saved, thread.being_saved = thread.being_saved, []
        for saved in being_saved:
            if saved.source is None:
                continue  # it has ended
            saved.before = thread.latest[-1]
            _previous(saved)  # forgets those that have ended
            saved.place = place = self._host.take(saved.nbytes)
            if place is None:
                stats.bytes_stayed += saved.nbytes
                continue
            saved.left = self._link.copy(place[: saved.nbytes], saved.source, self._link.out, after=saved.home)  # (1)
            thread.latest[-1] = saved
            stats.copies_out += 1
            stats.bytes_out += saved.nbytes
            stats.host_bytes += place.numel()
            stats.host_bytes_peak = max(stats.host_bytes_peak, stats.host_bytes)
            self._leaving[saved] = saved.nbytes
            self._trim(self._leaving, self._window_bytes, self._free_source)

    def _trim(self, window: dict[_Saved, int], nbytes: int, free: Callable[[_Saved], None]) -> None:
        while sum(window.values()) > nbytes:
            oldest = next(iter(window))
            del window[oldest]
            free(oldest)

    def _free_source(self, saved: _Saved) -> None:
        self._link.wait(saved.home, saved.left)  # (2)
        if saved.home is not None:
            saved.source.record_stream(saved.home)  # maybe another stream allocated it
        saved.source = None
        self.stats.device_bytes -= saved.nbytes

    def _bring(self, saved: _Saved) -> Tensor:
        """Returns all bytes of a storage, ready for the current stream; reloads ahead what was saved before."""
        here = self._link.here()
        if saved.source is None and saved.returned is None:
            self._fetch(saved)
        found: Tensor = saved.returned if saved.source is None else saved.source
        if saved.source is None:
            self._link.wait(here, saved.arrived)  # (4)
            self._ahead.pop(saved, None)
            self._read.pop(saved, None)
            self._read[saved] = saved.nbytes  # the latest
            self._trim(self._read, max(self._window_bytes, saved.nbytes), self._free_reload)  # still there where in use
        if here != saved.home:
            found.record_stream(here)
        self._prefetch(saved)
        return found

    def _prefetch(self, saved: _Saved) -> None:
        """Reloads what left before, the latest first, as long as the window has room."""
        while (before := _previous(saved)) is not None:
            if before.source is None and before.returned is None:
                if sum(self._ahead.values()) + before.nbytes > self._window_bytes:
                    return
                try:
                    self._fetch(before)
                except torch.OutOfMemoryError:
                    return  # later, when backward asks and the device has room
                self._ahead[before] = before.nbytes
            saved = before

    def _fetch(self, saved: _Saved) -> None:
        with torch.cuda.stream(saved.home):
            buffer = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._link.device)
        # (3); and after the copy out, for which the home stream has waited.
        saved.arrived = self._link.copy(buffer, saved.place[: saved.nbytes], self._link.back, after=saved.home)
        saved.returned = buffer
        self.stats.bytes_in += saved.nbytes
        self.stats.device_bytes += saved.nbytes

    def _free_reload(self, saved: _Saved) -> None:
        self._link.wait(saved.home, saved.arrived)  # its memory's next owner comes after a copy that nobody waited for
        self._link.wait(self._link.out, saved.arrived)  # (5), where a stream that is not its home saves next
        saved.returned = None
        self.stats.device_bytes -= saved.nbytes

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._end_dropped()
                yield
        finally:
            self._sweep()

    def _drop(self, saved: _Saved) -> None:
        """Finalizer: runs in any thread, by a garbage collection also while this thread has the lock."""
        self._dropped.append(saved)
        self._sweep()

    def _sweep(self) -> None:
        """Ends what was dropped. Where the lock is taken, its holder does so next."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._end_dropped()
            finally:
                self._lock.release()

    def _end_dropped(self) -> None:
        while self._dropped:
            saved = self._dropped.popleft()
            for window in self._windows:
                window.pop(saved, None)
            if saved.source is not None:
                self._free_source(saved)
            if saved.returned is not None:
                self._free_reload(saved)
            if saved.place is not None:
                self._host.give_back(saved.place)
                self.stats.host_bytes -= saved.place.numel()
                saved.place = None
            self.stats.live -= 1


def _previous(saved: _Saved) -> _Saved | None:
    """Returns the last that left before `saved` and has not ended."""
    while saved.before is not None and saved.before.place is None:
        saved.before = saved.before.before
    return saved.before


def _content(tensor: Tensor) -> Any:
    """State of a storage: the version, and the part that it counts for where that is not all, as with `unsafe_chunk`."""
    whole = tensor if tensor._base is None else tensor._base
    if not tensor._version or whole.numel() * whole.itemsize == whole.untyped_storage().nbytes():
        return tensor._version
    return tensor._version, whole.storage_offset(), whole.size(), whole.stride()


def _is_cast_of_parameter(tensor: Tensor) -> bool:
    """True for autocast's copy of a parameter, and views of it."""
    node: Any = tensor.grad_fn
    for _ in range(4):
        if node is None or node.name() not in CASTS:
            return False
        node = node.next_functions[0][0]
        if hasattr(node, "variable"):
            return isinstance(node.variable, nn.Parameter)
    return False


def train(asked: Namespace, around: Any) -> tuple[list[Tensor], float]:
    """Trains from one start; returns losses and parameters, and the seconds of the fastest step."""
    torch.manual_seed(0)
    with torch.device(asked.device):
        sizes = asked.width, asked.width // 64, 4 * asked.width, 0.0, "gelu"
        layers = [nn.Sequential(nn.TransformerEncoderLayer(*sizes), nn.Dropout(0.1)) for _ in range(asked.layers)]
        model = nn.Sequential(nn.Embedding(512, asked.width), *layers, nn.Linear(asked.width, 512))
        tokens = torch.randint(512, (asked.tokens, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, times = [], []
    for _ in range(asked.steps):
        began = time.perf_counter()
        with around, torch.autocast(asked.device, torch.bfloat16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())  # waits for the GPU
        times.append(time.perf_counter() - began)
    return [*losses, *(parameter.detach().cpu() for parameter in model.parameters())], min(times)


def main() -> int:
    """Compares trainings; returns 1 where a bit differs."""
    on_gpu = torch.cuda.is_available()
    parser = ArgumentParser(description="Trains with and without save_on_cpu_overlapped, and compares.")
    sizes = {"layers": (4, 16), "width": (128, 2048), "tokens": (256, 32768), "steps": (3, 5)}
    for name, default in {**sizes, "host-mib": (256, 65536), "window-mib": (1, 1024)}.items():
        parser.add_argument(f"--{name}", type=int, default=default[on_gpu])
    asked = parser.parse_args(namespace=Namespace(device="cuda" if on_gpu else "cpu"))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the next line, on a GPU
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    offload = save_on_cpu_overlapped(asked.host_mib << 20, window_bytes=asked.window_mib << 20)
    plain: list[Tensor] = []
    for way in (contextlib.nullcontext(), save_on_cpu(pin_memory=on_gpu), offload):
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        tensors, seconds = train(asked, way)
        plain = plain or tensors
        equal = "bit-equal" if all(map(torch.equal, plain, tensors)) else "NOT equal"
        peak = f"  step {seconds:.3f} s  peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpu else ""
        print(f"{type(way).__name__:22}  {equal}{peak}")
    print(offload.stats)
    return 0 if equal == "bit-equal" else 1


if __name__ == "__main__":
    raise SystemExit(main())
