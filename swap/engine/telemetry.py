"""Telemetry of one engine: counters always, trace events where there is a tracer, each warning once.

It owns the counters, the trace and the layer-boundary callback. It decides nothing.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import TYPE_CHECKING

from memo.swap.backends.protocol import HostStamp
from memo.swap.engine.trace_events import TraceEvents
from memo.swap.stats import Stats
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from memo.events import StallCause, TierName, Tracer
    from memo.swap.backends.protocol import Backend, Stamp
    from memo.swap.engine.saved_storage import SavedStorage

_NO_RANGE = contextlib.nullcontext()
SHORTEST_STALL_NS = 20_000  # shorter ones are the engine's own work


class Telemetry:
    """Statistics of one engine.

    Times are the device's, where `backend` measures them. The host never waits for them: `settle_times` counts those of
    work that the device has finished.
    """

    __slots__ = (
        "_backend",
        "_pending",
        "_settling",
        "_warned",
        "boundary_callback",
        "changed",
        "entered",
        "memory_callback",
        "recompute_callback",
        "stats",
        "trace",
    )

    def __init__(self, tracer: Tracer | None, backend: Backend) -> None:
        self.stats = Stats()
        self.trace: TraceEvents | None
        self.changed: Callable[[SavedStorage], None] | None
        """Called after each state transition of a new storage; None without a tracer."""
        self.boundary_callback: Callable[[str | None], None] | None = None
        """Layer-boundary callback; see `Engine.at_layer_boundaries`."""
        self.recompute_callback: Callable[[str | None, bool, int], None] | None = None
        """Called at the begin and end of recomputes, and for None of trials."""
        self.memory_callback: Callable[[], None] | None = None
        """Called at layer boundaries before that one, which may restart the device's peak; see `Engine.sample_memory`."""
        self.entered: str | None = None
        """The layer entered last, in forward or backward; None after a forward."""
        self._backend = backend
        self._pending: collections.deque[tuple[Stamp, Stamp, Callable[[int, int], None]]] = collections.deque()
        self._settling = threading.Lock()  # forward's thread and backward's settle, neither under the engine's lock
        self._warned: set[str] = set()
        self.listen(tracer)

    def listen(self, tracer: Tracer | None) -> None:
        """Sets the receiver of trace events; None: no trace."""
        self.trace = None if tracer is None else TraceEvents(tracer, self._backend)
        self.changed = None if self.trace is None else self.trace.changed

    def left(self, saved: SavedStorage, tier: TierName, sign: int = 1) -> None:
        """Counts a storage as gone to `tier`; with `sign` -1 as not gone."""
        nbytes = saved.place_nbytes
        if saved.coded is not None:
            self.stats.bytes_coded += sign * saved.nbytes
            self.stats.bytes_codes += sign * nbytes
        self.stats.moved(tier, sign * nbytes)

    def at_layer_boundary(self, entered: str | None) -> None:
        """Notes the layer, and calls the layer-boundary callbacks."""
        self.entered = entered
        if self.memory_callback is not None:
            self.memory_callback()
        if self.boundary_callback is not None:
            self.boundary_callback(entered)

    def at_recompute(self, module: str | None, *, begins: bool, absent_nbytes: int = 0) -> None:
        """Calls the callback of recomputes as a layer's begins or ends within its backward, or for None a trial."""
        if self.recompute_callback is not None:
            self.recompute_callback(module, begins, absent_nbytes)

    def issuing(self, what: str, module: str) -> AbstractContextManager[None]:
        """A profiler range around the issue of a copy or a recompute; none without a tracer."""
        return _NO_RANGE if self.trace is None else self.trace.range(f"{what} {module}")

    def begin_wait(self, stream: int | None = None, *, stops_host: bool = False) -> Stamp | None:
        """Stamps a compute stream that is about to wait for a copy; None where its time is not measured.

        The host's clock measures a wait that stops the host, where the device's time is not measured.
        """
        stamp = self._backend.stamp(stream)
        return HostStamp() if stamp is None and stops_host else stamp

    def waited(
        self,
        began: Stamp | None,
        cause: StallCause,
        module: str,
        ident: int | None = None,
        *,
        stream: int | None = None,
    ) -> None:
        """Counts an issued wait, from `began` to the stream's current end; `ident` is the storage waited for."""
        if type(began) is HostStamp:
            self._stalled(began.at, self._backend.now_ns(), cause, module, ident)
            return
        ended = None if began is None else self._backend.stamp(stream)
        if began is None or ended is None:
            self.stats.untimed_waits += 1
            return
        self._pending.append((began, ended, lambda begin, end: self._stalled(begin, end, cause, module, ident)))

    def _stalled(self, begin_ns: int, end_ns: int, cause: StallCause, module: str, ident: int | None) -> None:
        if end_ns - begin_ns < SHORTEST_STALL_NS:
            return
        self.stats.stalls_ns[cause] += end_ns - begin_ns
        if self.trace is not None:
            self.trace.stalled(begin_ns, end_ns - begin_ns, cause, module, ident)

    def recomputed(self, began: Stamp | None, module: str) -> None:
        """Counts a layer's issued recompute, from `began` to the current end of the caller's stream."""
        ended = None if began is None else self._backend.stamp()
        if began is None or ended is None:
            self.stats.untimed_recomputes += 1
            return
        self._pending.append((began, ended, self._recomputed))
        if self.trace is not None:
            self.trace.recompute_ended(module, began, ended)
        self.settle_times()

    def _recomputed(self, begin_ns: int, end_ns: int) -> None:
        self.stats.recompute_ns += end_ns - begin_ns

    def settle_times(self, *, wait: bool = False) -> None:
        """Counts the waits and recomputes that the device has finished; with `wait`, waits for all of them."""
        with self._settling:
            while self._pending:
                began, ended, count = self._pending[0]
                if wait:
                    ended.synchronize()
                begin_ns, end_ns = began.ns(), ended.ns()
                if begin_ns is None or end_ns is None:
                    return
                self._pending.popleft()
                count(begin_ns, end_ns)

    def warn(self, cause: str, message: str) -> None:
        """Warns once of each `cause`; every occurrence goes to the trace. `message` says what is done instead."""
        if self.trace is not None:
            self.trace.noted(cause, message)
        if cause not in self._warned:
            self._warned.add(cause)
            warn_user(message)
