"""What one engine has done: numbers always, events where somebody listens, and each warning once.

It owns the counters and the journal. What it is told it keeps and passes on; it decides nothing.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

from memo.swap.journal import Journal
from memo.swap.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.swap.backend import Stamp
    from memo.swap.saved import SavedStorage
    from memo.trace.events import StallCause, Tracer, UseKind

__all__ = ["Account"]

SHORTEST_STALL_NS = 20_000  # shorter ones are the engine's own work


class Account:
    """`stamp` takes the time on the caller's compute stream; nobody asks for it unless somebody listens."""

    __slots__ = ("_stamp", "_warned", "at_edge", "changed", "journal", "stats")

    def __init__(self, tracer: Tracer | None, stamp: Callable[[], Stamp]) -> None:
        self.stats = Stats()
        self.journal: Journal | None
        self.changed: Callable[[SavedStorage], None] | None
        """What each new storage tells of its transitions."""
        self.at_edge: Callable[[str | None], None] | None = None
        """Called with the layer whose forward begins or that backward comes to; with None where a forward ends."""
        self._stamp = stamp
        self._warned: set[str] = set()
        self.listen(tracer)

    def listen(self, tracer: Tracer | None) -> None:
        """From now on `tracer` is told what happens; None for nobody."""
        self.journal = None if tracer is None else Journal(tracer, self._stamp)
        self.changed = None if self.journal is None else self.journal.changed

    def comes_to_edge(self, begins: str | None) -> None:
        """A layer begins in either direction, or ends."""
        if self.at_edge is not None:
            self.at_edge(begins)

    def waited(self, begin_ns: int, cause: StallCause, module: str, ident: int | None = None) -> None:
        """Host time since `begin_ns` may have gone into waiting for a copy."""
        duration = time.monotonic_ns() - begin_ns
        if duration < SHORTEST_STALL_NS:
            return
        self.stats.stalls_ns[cause] += duration
        if self.journal is not None:
            self.journal.stalled(begin_ns, duration, cause, module, ident)

    def used(self, saved: SavedStorage, how: UseKind) -> None:
        """Backward has asked for a storage for the first time."""
        self.stats.uses[how] += 1
        if self.journal is not None:
            self.journal.used(saved, how)

    def warn(self, cause: str, message: str) -> None:
        """Something did not go as planned, and what became of it."""
        if self.journal is not None:
            self.journal.noted(cause, message)
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(message, RuntimeWarning, stacklevel=2)
