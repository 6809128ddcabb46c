"""Disk operations, their pieces, and the extents that they write and read.

An operation waits for its `after` events, is queued, runs piece by piece on any I/O thread, and is done. It is also the
event that its caller holds: `synchronize` raises its failure, at every call. It keeps the tensor alive until it is
done; nothing else prevents reuse of that memory during the transfer.

    WAITING ──▶ QUEUED ──▶ RUNNING ──▶ DONE
       └────────────┴── cancel ─────────▲
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from memo import forks
from memo.errors import MemoError, StoreReadError, StoreWriteError, SwapError
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from memo.swap.backends.protocol import Event


class OperationKind(enum.Enum):
    """Direction of a transfer; the value is used in messages."""

    WRITE = "write"
    READ = "read"

    @property
    def error(self) -> type[StoreReadError] | type[StoreWriteError]:
        """Exception class for a failure in this direction."""
        return StoreWriteError if self is OperationKind.WRITE else StoreReadError


class OperationStage(enum.Enum):
    """State of an operation; the value is used in the stall warning."""

    WAITING = "waiting for the copies before it"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False, weakref_slot=True)
class DiskExtent:
    """Reserved range of the scratch space. All metadata is in RAM; the disk holds raw bytes only.

    Its owner and the operations on it hold it. An interrupted owner may lose it without a release.
    """

    offset: int
    nbytes: int
    claim: tuple[int, int] = (0, 0)
    """Its number within its step, and the step."""
    written_bytes: int = 0
    """Length of the latest write. Bytes beyond it belong to an earlier tensor."""
    pending: int = 0
    """Number of operations on this extent that are not done."""
    released: bool = False
    moved: dict[int, Piece] = field(default_factory=dict)
    """Pieces, by their start within the extent, that lie elsewhere since their file failed."""
    checksums: dict[int, int] = field(default_factory=dict)
    """CRC-32 of each piece, by its start within the extent; filled only by a store that verifies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of an operation that one thread transfers in one call; lies in one file."""

    start: int
    """Byte offset within the extent and within the tensor."""
    nbytes: int
    file_index: int
    file_offset: int


class DiskOperation:
    """Implements `memo.swap.backends.Timed`. The I/O pool's lock guards every mutable field."""

    __slots__ = (
        "_forks",
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
        "stage",
        "stall_warning_s",
        "start_ns",
        "tensor",
        "unfinished",
    )

    def __init__(
        self,
        kind: OperationKind,
        extent: DiskExtent,
        tensor: torch.Tensor,
        *,
        pieces: Sequence[Piece],
        after: Sequence[Event],
        place: str,
        cancel_with: Callable[[DiskOperation], bool],
        stall_warning_s: float,
    ) -> None:
        self.kind = kind
        self.extent = extent
        self.tensor: torch.Tensor | None = tensor
        self.pieces = pieces
        self.after = after
        self.place = place
        self.cancel_with = cancel_with
        self.stall_warning_s = stall_warning_s
        self.stage = OperationStage.WAITING
        self.next_piece = 0
        self.unfinished = len(pieces)
        self.start_ns = 0
        self.end_ns = 0
        self.failure: tuple[type[MemoError], str, BaseException | None] | None = None
        # Held until the operation is done. A bare lock costs a tenth of a threading.Event; most are never waited for.
        self._forks = forks.count()
        self._running = threading.Lock()
        self._running.acquire()

    def finish(self) -> None:
        """Enters DONE and wakes the waiters. Called once, by the I/O pool."""
        self.extent.pending -= 1
        self.tensor = None
        self.after = ()
        self.stage = OperationStage.DONE
        self._running.release()

    def query(self) -> bool:
        """Returns True once the operation is done, failed or cancelled."""
        return self.stage is OperationStage.DONE

    def synchronize(self) -> None:
        """Waits until the operation is done; warns once when that takes longer than the stall limit.

        Raises:
            StoreWriteError, StoreReadError, CorruptBlock: The operation failed. A write's source is unchanged, a
                read's target holds garbage.
            SwapError: This is a forked child, in which it has no end.
        """
        if not self._wait(self.stall_warning_s):
            warn_user(
                f"{self.describe()} has not finished after {self.stall_warning_s:g} s ({self.stage.value});"
                " the disk is slow or stalled"
            )
            self._wait(-1)
        if self.failure is not None:
            kind, message, cause = self.failure
            raise kind(message) from cause

    def _wait(self, timeout_s: float) -> bool:
        """True once done; each waiter releases the lock for the next one."""
        if self.stage is OperationStage.DONE:
            return True
        forks.require_same(self._forks)
        if not self._running.acquire(timeout=timeout_s):
            return False
        self._running.release()
        return True

    def interval_ns(self) -> tuple[int, int] | None:
        """Returns start of the first piece and end of the last; None while it runs and when nothing was moved."""
        return (self.start_ns, self.end_ns) if self.query() and self.start_ns else None

    def cancel(self) -> bool:
        """Cancels the operation, which is then done; False if a transfer had started."""
        return self.cancel_with(self)

    def describe(self) -> str:
        """Returns, for example, `write of 65536 bytes at offset 4096 of the scratch in /scratch`."""
        nbytes = sum(piece.nbytes for piece in self.pieces)
        where = f"offset {self.extent.offset} of the scratch in {self.place}"
        return f"{self.kind.value} of {nbytes} bytes at {where}"


def check_fits(extent: DiskExtent, tensor: torch.Tensor, limit: int) -> None:
    """Checks that a tensor can be transferred to or from the first `limit` bytes of an extent.

    Raises:
        ValueError: The tensor is not contiguous uint8, is empty, or is larger than `limit` bytes.
        SwapError: The extent was released.
    """
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
        raise ValueError(f"the disk takes contiguous uint8 tensors, not {tensor.dtype} of strides {tensor.stride()}")
    if extent.released:
        raise SwapError(f"the extent at {extent.offset} was released")
    if not 0 < tensor.numel() <= limit:
        raise ValueError(f"{tensor.numel()} bytes do not fit the {limit} of the extent at {extent.offset}")
