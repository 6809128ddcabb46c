"""One operation of the disk tier: the event its caller holds, and the pieces the I/O threads run.

An operation waits for its `after` events, is queued, runs piece by piece on any thread, and is done. Its failure is
kept here and raised by `synchronize`, as often as that is called. The tensor is held until the operation is done:
nothing else keeps its memory from being reused under the transfer.

    WAITING ──▶ QUEUED ──▶ RUNNING ──▶ DONE
       └────────────┴── cancel ─────────▲
"""

from __future__ import annotations

import enum
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memo.errors import MemoError, StoreReadError, StoreWriteError

if TYPE_CHECKING:
    import torch

    from memo.swap.backends.protocol import Event

__all__ = ["DiskExtent", "DiskOperation", "Kind", "Piece", "Stage"]


class Kind(enum.Enum):
    """Which way the bytes go; the value is the word in messages."""

    WRITE = "write"
    READ = "read"

    @property
    def error(self) -> type[StoreReadError] | type[StoreWriteError]:
        return StoreWriteError if self is Kind.WRITE else StoreReadError


class Stage(enum.Enum):
    """Where an operation is; the value is what the stall warning says."""

    WAITING = "waiting for the copies before it"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class DiskExtent:
    """A reserved range of the scratch space. The ledger lives in RAM only: the disk holds nothing but raw bytes."""

    offset: int
    nbytes: int
    written_bytes: int = 0
    """Length of the latest write; reading further would return another tensor's bytes."""
    pending: int = 0
    """Operations on this extent that are not done."""
    released: bool = False
    checksums: dict[int, int] = field(default_factory=dict)
    """Start of a piece within the extent -> its checksum; filled only by a store that verifies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of an operation that one thread transfers in one go."""

    start: int
    """Offset within the extent, and within the tensor."""
    nbytes: int
    file_index: int
    file_offset: int


class DiskOperation:
    """A `memo.swap.backends.protocol.Timed`. The I/O pool's lock guards every field that changes."""

    __slots__ = (
        "_running",
        "after",
        "cancel_with",
        "end_ns",
        "extent",
        "failure",
        "kind",
        "next_piece",
        "pieces",
        "place",
        "rank",
        "stage",
        "stall_warning_s",
        "start_ns",
        "tensor",
        "unfinished",
    )

    def __init__(
        self,
        kind: Kind,
        extent: DiskExtent,
        tensor: torch.Tensor,
        *,
        pieces: Sequence[Piece],
        after: Sequence[Event],
        rank: int,
        place: str,
        cancel_with: Callable[[DiskOperation], bool],
        stall_warning_s: float,
    ) -> None:
        self.kind = kind
        self.extent = extent
        self.tensor: torch.Tensor | None = tensor
        self.pieces = pieces
        self.after = after
        self.rank = rank
        self.place = place
        self.cancel_with = cancel_with
        self.stall_warning_s = stall_warning_s
        self.stage = Stage.WAITING
        self.next_piece = 0
        self.unfinished = len(pieces)
        self.start_ns = 0
        self.end_ns = 0
        self.failure: tuple[type[MemoError], str, BaseException | None] | None = None
        # Held until the operation is done: a bare lock costs a tenth of a threading.Event, and most are never waited for.
        self._running = threading.Lock()
        self._running.acquire()

    def finish(self) -> None:
        """The last transition, made once by the I/O pool; wakes whoever waits."""
        self.tensor = None
        self.after = ()
        self.stage = Stage.DONE
        self._running.release()

    def query(self) -> bool:
        """True once the bytes have arrived, or never will."""
        return self.stage is Stage.DONE

    def synchronize(self) -> None:
        """Waits until then; warns once when that takes longer than the stall limit.

        Raises:
            StoreWriteError, StoreReadError, CorruptBlock: the operation failed; a write's source was not touched, a
                read's target holds garbage.
        """
        if not self._wait(self.stall_warning_s):
            warnings.warn(
                f"{self.describe()} has not finished after {self.stall_warning_s:g} s ({self.stage.value});"
                " the disk is slow or stalled",
                RuntimeWarning,
                stacklevel=2,
            )
            self._wait(-1)
        if self.failure is not None:
            kind, message, cause = self.failure
            raise kind(message) from cause

    def _wait(self, timeout_s: float) -> bool:
        """True once done; each waiter passes the lock on to the next."""
        if self.stage is Stage.DONE:
            return True
        if not self._running.acquire(timeout=timeout_s):
            return False
        self._running.release()
        return True

    def interval_ns(self) -> tuple[int, int] | None:
        """When the first piece began and the last one ended; None while it runs and when nothing was moved."""
        return (self.start_ns, self.end_ns) if self.query() and self.start_ns else None

    def cancel(self) -> bool:
        """True if no byte had moved and none will; the event is then done."""
        return self.cancel_with(self)

    def describe(self) -> str:
        """`rank 0: write of 65536 bytes at offset 4096 of the scratch in /scratch`."""
        nbytes = sum(piece.nbytes for piece in self.pieces)
        where = f"offset {self.extent.offset} of the scratch in {self.place}"
        return f"rank {self.rank}: {self.kind.value} of {nbytes} bytes at {where}"
