"""Statistics of one engine: counters always, trace events where there is a tracer, each warning once.

It owns the counters and the journal. It decides nothing.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import warnings
from typing import TYPE_CHECKING

from memo.swap.backends.protocol import HostStamp
from memo.swap.engine.trace_events import TraceEvents
from memo.swap.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from memo.events import StallCause, Tracer, UseKind
    from memo.swap.backends.protocol import Backend, Stamp
    from memo.swap.engine.saved_storage import SavedStorage

__all__ = ["Telemetry"]

_NO_RANGE = contextlib.nullcontext()
SHORTEST_STALL_NS = 20_000  # shorter ones are the engine's own work


class Telemetry:
    """Statistics of one engine. Times are the device's where `backend` measures them; the host never waits for them, so
    that those of work that the device has still to do are counted later (`settle_times`)."""

    __slots__ = ("_backend", "_pending", "_settling", "_warned", "at_edge", "changed", "journal", "stats")

    def __init__(self, tracer: Tracer | None, backend: Backend) -> None:
        self.stats = Stats()
        self.journal: TraceEvents | None
        self.changed: Callable[[SavedStorage], None] | None
        """Callback for the state transitions of each new storage; None without a tracer."""
        self.at_edge: Callable[[str | None], None] | None = None
        """Layer-boundary callback; see `Engine.at_edges`."""
        self._backend = backend
        self._pending: collections.deque[tuple[Stamp, Stamp, Callable[[int, int], None]]] = collections.deque()
        self._settling = threading.Lock()  # forward's thread and backward's settle, neither under the engine's lock
        self._warned: set[str] = set()
        self.listen(tracer)

    def listen(self, tracer: Tracer | None) -> None:
        """Sends events to `tracer` from now on; None for nowhere."""
        self.journal = None if tracer is None else TraceEvents(tracer, self._backend)
        self.changed = None if self.journal is None else self.journal.changed

    def comes_to_edge(self, begins: str | None) -> None:
        """Calls the layer-boundary callback."""
        if self.at_edge is not None:
            self.at_edge(begins)

    def issuing(self, what: str, module: str) -> AbstractContextManager[None]:
        """A profiler range around the issue of a copy or a recompute; none without a tracer."""
        return _NO_RANGE if self.journal is None else self.journal.range(f"{what} {module}")

    def begin_wait(self, stream: int | None = None, *, stops_host: bool = False) -> Stamp | None:
        """Stamps a compute stream that is about to wait for a copy; None where its time is not measured.

        A wait that stops the host instead of the device is measured by the host's clock where the device's is not.
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
        """Counts a wait that has been issued, from `began` to the stream's end now; `ident` is the storage waited for."""
        if type(began) is HostStamp:
            self._stalled(began.at, time.monotonic_ns(), cause, module, ident)
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
        if self.journal is not None:
            self.journal.stalled(begin_ns, end_ns - begin_ns, cause, module, ident)

    def recomputed(self, began: Stamp | None, module: str) -> None:
        """Counts a layer's recompute that has been issued, from `began` to the end of the caller's stream now."""
        ended = None if began is None else self._backend.stamp()
        if began is None or ended is None:
            self.stats.untimed_recomputes += 1
            return
        self._pending.append((began, ended, self._recomputed))
        if self.journal is not None:
            self.journal.recompute_ended(module, began, ended)
        self.settle_times()

    def _recomputed(self, begin_ns: int, end_ns: int) -> None:
        self.stats.recompute_ns += end_ns - begin_ns

    def settle_times(self, *, wait: bool = False) -> None:
        """Counts the waits and recomputes that the device is through with by now, or all of them where it may `wait`."""
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

    def used(self, saved: SavedStorage, how: UseKind) -> None:
        """Counts how backward found a storage that it asked for the first time."""
        self.stats.uses[how] += 1
        if self.journal is not None:
            self.journal.used(saved, how)

    def warn(self, cause: str, message: str) -> None:
        """Warns once of each `cause`; every occurrence goes to the trace. `message` says what was done instead."""
        if self.journal is not None:
            self.journal.noted(cause, message)
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(message, RuntimeWarning, stacklevel=2)
