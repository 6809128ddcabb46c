"""Trace events of the engine: one for each state transition, copy, layer, use and wait.

Copies and layers take time on the device: their spans are kept here until they have ended, and are emitted at the end of a
step. Everything else is emitted at once. Without a tracer this object does not exist, and no clock is read for it. Layers,
copies and recomputes are also ranges of the device's profiler (NVTX).
"""

from __future__ import annotations

import collections
import contextlib
import re
from typing import TYPE_CHECKING, NamedTuple

from memo.events import Lane, Note, Span, Stall, StateChange, StorageUse
from memo.swap.backends.protocol import HostStamp
from memo.swap.engine.python_lines import python_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from memo.events import StallCause, Tracer, UseKind
    from memo.swap.backends.protocol import Backend, Stamp, Timed
    from memo.swap.engine.saved_storage import SavedStorage

_NUMBERED = re.compile(r"Backward\d*$")
_VIEWS = (
    "View",
    "UnsafeView",
    "Reshape",
    "ReshapeAlias",
    "Transpose",
    "T",
    "Permute",
    "Split",
    "Expand",
    "Unsqueeze",
    "Squeeze",
    "Slice",
)
_MOST_VIEWS = 8


class Began(NamedTuple):
    """Begin of a layer's forward or backward: its time, None where not measured, the host's, and its profiler range."""

    stamp: Stamp | None
    issued: int
    range: int


class RunLayer(NamedTuple):
    """Layer's forward, backward or recompute that has been issued."""

    module: str
    lane: Lane
    phase: str
    step: int
    began: Stamp
    ended: Stamp
    issued: int | None = None
    """When the host had issued its begin; None for a recompute."""
    issued_d: int | None = None


class TraceEvents:
    """The events of one engine, timed by its backend."""

    def __init__(self, tracer: Tracer, backend: Backend) -> None:
        self._backend = backend
        self._tracer = tracer
        self._copies: collections.deque[tuple[int, int, int | None, Lane, Timed, int]] = collections.deque()
        self._layers: collections.deque[RunLayer] = collections.deque()
        self._backward: tuple[str, Began] | None = None  # the layer whose backward is running

    def changed(self, saved: SavedStorage, first: torch.Tensor | None = None) -> None:
        """Emits a state transition of a storage; `first` is the tensor it was saved for, at its first transition."""
        tracer = self._tracer
        tracer.emit(
            StateChange(
                t=tracer.now(),
                step=tracer.step,
                id=saved.id,
                to=saved.state,
                nbytes=saved.nbytes,
                tier=saved.extent.tier.name if saved.extent is not None else None,
                module=saved.module if first is not None else None,
                shape=tuple(first.shape) if first is not None else None,
                dtype=str(first.dtype).removeprefix("torch.") if first is not None else None,
                op=None if first is None else _operation(first),
                line=python_lines() if first is not None and tracer.stacks else None,
                coded_nbytes=saved.place_nbytes if first is not None and saved.coded is not None else None,
            )
        )

    def copying(self, saved: SavedStorage, lane: Lane, event: Timed) -> None:
        """Records an issued copy of a storage."""
        values = None if saved.coded is None else saved.nbytes
        self._copies.append((saved.id, saved.place_nbytes, values, lane, event, self._tracer.step))

    def begin(self, name: str) -> Began:
        """Begins a layer's forward or backward."""
        return Began(self._backend.stamp(), self._tracer.now(), self._backend.begin_range(name))

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A profiler range around the issue of a copy or a recompute."""
        number = self._backend.begin_range(name)
        try:
            yield
        finally:
            self._backend.end_range(number)

    def forward_ended(self, module: str, began: Began) -> None:
        """Records that a layer's forward has been issued."""
        self._ended(module, "forward", began)

    def _ended(self, module: str, phase: str, began: Began) -> None:
        self._backend.end_range(began.range)
        ended = self._backend.stamp()
        if began.stamp is not None and ended is not None:
            issued = None if type(ended) is HostStamp else began.issued  # not where the device's clock is the host's
            took = None if issued is None else self._tracer.now() - issued
            self._layers.append(
                RunLayer(module, Lane.COMPUTE, phase, self._tracer.step, began.stamp, ended, issued, took)
            )

    def recompute_ended(self, module: str, began: Stamp, ended: Stamp) -> None:
        """Records an issued recompute of a layer."""
        self._layers.append(RunLayer(module, Lane.RECOMPUTE, "backward", self._tracer.step, began, ended))

    def backward_reached(self, module: str) -> None:
        """Ends the backward of the layer before, and begins that of `module`."""
        self.backward_left()
        self._backward = (module, self.begin(f"backward {module}"))

    def backward_left(self) -> None:
        """Ends the running backward of a layer, if there is one."""
        if self._backward is not None:
            module, began = self._backward
            self._ended(module, "backward", began)
            self._backward = None

    def stalled(self, begin_ns: int, duration_ns: int, cause: StallCause, module: str, ident: int | None) -> None:
        """Emits a wait of a compute stream, or of the host in its place, for a copy."""
        t, step = self._tracer.at(begin_ns), self._tracer.step
        self._tracer.emit(Stall(t=t, d=duration_ns, step=step, cause=cause, module=module, id=ident))

    def used(self, saved: SavedStorage, how: UseKind) -> None:
        """Emits the first read of a storage by backward."""
        self._tracer.emit(StorageUse(t=self._tracer.now(), step=self._tracer.step, id=saved.id, how=how))

    def noted(self, cause: str, message: str, module: str | None = None) -> None:
        """Emits a warning or a fallback, of a layer where one is named."""
        t, step = self._tracer.now(), self._tracer.step
        self._tracer.emit(Note(t=t, step=step, cause=cause, message=message, module=module))

    def finish(self) -> None:
        """Emits all spans of layers, waiting for those that still run."""
        self.backward_left()
        for layer in self._layers:
            layer.ended.synchronize()
        self.end_step()

    def end_step(self) -> None:
        """Emits the spans that have ended since the last call; keeps those still running."""
        self.backward_left()
        tracer = self._tracer
        for _ in range(len(self._copies)):
            ident, nbytes, values, lane, event, step = self._copies.popleft()
            if not event.query():
                self._copies.append((ident, nbytes, values, lane, event, step))
                continue
            interval = event.interval_ns()
            if interval is not None:
                start, end = tracer.at(interval[0]), tracer.at(interval[1])
                took = end - start
                tracer.emit(Span(t=start, d=took, step=step, lane=lane, id=ident, nbytes=nbytes, decoded_nbytes=values))
        for _ in range(len(self._layers)):
            layer = self._layers.popleft()
            begin_ns, end_ns = layer.began.ns(), layer.ended.ns()
            if begin_ns is None or end_ns is None:
                self._layers.append(layer)
                continue
            t = tracer.at(begin_ns)
            tracer.emit(
                Span(
                    t=t,
                    d=tracer.at(end_ns) - t,
                    step=layer.step,
                    lane=layer.lane,
                    module=layer.module,
                    phase=layer.phase,
                    issued=layer.issued,
                    issued_d=layer.issued_d,
                )
            )


def _operation(tensor: torch.Tensor) -> str | None:
    """Name of the operation that computed a tensor, behind views of its result; None where autograd has none."""
    node = tensor.grad_fn
    name = None
    for _ in range(_MOST_VIEWS):
        if node is None:
            break
        name = _NUMBERED.sub("", node.name())
        if name not in _VIEWS or not node.next_functions:
            break
        node = node.next_functions[0][0]
    return name
