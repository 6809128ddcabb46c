"""The disk tier straight from GPU memory: GPUDirect Storage through kvikio's asynchronous calls on CUDA streams.

Same scratch space as `memo.swap.disk.store`, no host memory and no thread of ours: each operation is put on a stream
of its own after the events it needs. Only where `memo doctor` finds GDS working: without it kvikio does the same calls
by blocking the caller, which the forward must never be.

An operation's success is known only from its byte count, and a CUDA event fires whether the bytes arrived or not. So
the event of an operation is waited for by the host, which then looks at the count; it is never handed to a stream.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memo.errors import MemoError, ScratchUnusable, SwapError
from memo.swap.disk.operation import DiskExtent, Kind, Piece
from memo.swap.disk.raw_file import RawFile
from memo.swap.disk.scratch import ScratchSpace

if TYPE_CHECKING:
    from memo.swap.backends.protocol import Event, Extent

__all__ = ["GdsDisk", "GdsOperation", "IoStream"]

_READ_RETRIES = 2
_MAX_LANES = 16  # streams in each direction; more operations than that share them in turn


class IoStream(Protocol):
    """What GdsDisk needs of a copy stream of the CUDA backend."""

    @property
    def stream(self) -> Any:
        """The torch stream; its `cuda_stream` is the raw handle."""

    def wait(self, event: Event) -> None:
        """Everything put on the stream later runs after `event`."""


class GdsOperation:
    """A `memo.swap.backends.protocol.Timed`. Holds the tensor, and kvikio's futures, until the bytes have been counted."""

    def __init__(self, kind: Kind, extent: DiskExtent, tensor: torch.Tensor, pieces: Sequence[Piece], label: str):
        self.kind = kind
        self.extent = extent
        self.tensor: torch.Tensor | None = tensor
        self.pieces = pieces
        self.label = label
        self.futures: list[Any] = []
        self.files: list[Any] = []
        self.arrived: Event | None = None
        """At the end of the operation on its stream; None when it could not even be issued."""
        self.failure: tuple[type[MemoError], str, BaseException | None] | None = None
        self.settled = False
        self._lock = threading.Lock()

    def query(self) -> bool:
        """True once the stream has passed the operation."""
        return self.settled or self.arrived is None or self.arrived.query()

    def synchronize(self) -> None:
        """Waits for the bytes and counts them.

        Raises:
            StoreWriteError, StoreReadError: not all of them arrived.
        """
        self.settle()
        if self.failure is not None:
            error, message, cause = self.failure
            raise error(message) from cause

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False  # what stands in a stream's order cannot be taken back

    def fail(self, piece: Piece, reason: object, cause: BaseException | None) -> None:
        if self.failure is None:
            message = f"{self.label}: {piece.nbytes} bytes at {piece.file_offset} failed: {reason}"
            self.failure = (self.kind.error, message, cause)

    def settle(self) -> None:
        """Waits for the bytes, counts them and lets go of the tensor; keeps a failure for `synchronize`."""
        with self._lock:
            if self.settled:
                return
            if self.arrived is not None:
                self.arrived.synchronize()
            for piece, future, file in zip(self.pieces, self.futures, self.files, strict=False):
                self._count(piece, future, file)
            self.settled = True
            self.tensor = None
            self.futures.clear()
            self.files.clear()
            self.extent.pending -= 1

    def _count(self, piece: Piece, future: Any, file: Any) -> None:
        count: Callable[[], int] = future.check_bytes_done
        for attempt in range(1 + (_READ_RETRIES if self.kind is Kind.READ else 0)):
            cause: RuntimeError | None = None
            try:
                moved = int(count())
                if moved == piece.nbytes:
                    return
                reason = f"{moved} bytes arrived"
            except RuntimeError as error:  # kvikio has no other exception, and no errno
                reason, cause = str(error), error
            if attempt < _READ_RETRIES:
                count = lambda: file.raw_read(self.tensor, piece.nbytes, piece.file_offset, piece.start)  # noqa: E731
        self.fail(piece, reason, cause)


class GdsDisk:
    """A `memo.swap.backends.protocol.Disk` for tensors in the memory of one GPU.

    `new_stream` makes a copy stream of that GPU, `record` an event at the current end of a torch stream.

    Raises:
        ScratchUnusable, ScratchFull: as ScratchSpace; also when kvikio is missing or would not use GDS. Nothing is
            left open.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        capacity: int | None,
        *,
        new_stream: Callable[[], IoStream],
        record: Callable[[Any], Event] | None = None,
        rank: int = 0,
        block_bytes: int = 16 << 20,
        spare_bytes: int = 1 << 30,
        kvikio: Any = None,
        open_file: Callable[[Path], RawFile] = RawFile,
    ) -> None:
        library = _import_kvikio() if kvikio is None else kvikio
        if library.defaults.is_compat_mode_preferred():
            raise ScratchUnusable("kvikio would not use GPUDirect Storage here; `memo doctor` tells why")
        self._rank = rank
        self._new_stream = new_stream
        self._record = _record if record is None else record
        self._lock = threading.Lock()
        self._lanes: dict[Kind, list[IoStream]] = {kind: [] for kind in Kind}
        self._running: list[tuple[IoStream, GdsOperation]] = []
        self._space = ScratchSpace(
            directories, capacity, block_bytes=block_bytes, spare_bytes=spare_bytes, open_file=open_file
        )
        self._files: list[Any] = []
        self.bytes_moved = dict.fromkeys(Kind, 0)
        try:
            for file in self._space.files:
                # kvikio opens by name; the file has none, but its descriptor does. "r+" because "w" would truncate.
                self._files.append(library.CuFile(f"/proc/self/fd/{file.fd}", "r+"))
        except BaseException as error:
            self._close_files()
            if isinstance(error, RuntimeError):
                raise ScratchUnusable(f"GPUDirect Storage does not take {self._space.place}: {error}") from error
            raise

    def reserve(self, nbytes: int) -> DiskExtent | None:
        """A range of at least `nbytes`, or None when the budget, or the file system, is used up."""
        return self._space.reserve(nbytes)

    def release(self, extent: Extent) -> None:
        """Gives the range back.

        Raises:
            SwapError: an operation on it is not done, or it was released before; nothing changes.
        """
        extent = _own(extent)
        with self._lock:
            for _, operation in self._running:
                if operation.extent is extent and operation.query():
                    operation.settle()
        self._space.release(extent)

    def write(self, extent: Extent, source: torch.Tensor, *, after: Sequence[Event] = ()) -> GdsOperation:
        """Writes all of `source` to the start of `extent` once `after` is done."""
        extent = _own(extent)
        _check(extent, source, extent.nbytes)
        extent.written_bytes = source.numel()
        return self._issue(Kind.WRITE, extent, source, after)

    def read(self, extent: Extent, target: torch.Tensor, *, after: Sequence[Event] = ()) -> GdsOperation:
        """Fills `target` with what was written to `extent`."""
        extent = _own(extent)
        _check(extent, target, extent.written_bytes)
        return self._issue(Kind.READ, extent, target, after)

    def close(self) -> None:
        """Waits for every operation, closes the files. Idempotent; failures stay with the operations."""
        with self._lock:
            for _, operation in self._running:
                operation.settle()
            self._running.clear()
            self._close_files()

    def _close_files(self) -> None:
        files, self._files = self._files, []
        for file in files:
            file.close()
        self._space.close()

    def _issue(self, kind: Kind, extent: DiskExtent, tensor: torch.Tensor, after: Sequence[Event]) -> GdsOperation:
        if not self._files:
            raise SwapError("the disk store is closed")
        pieces = self._space.split(extent.offset, tensor.numel())
        label = f"rank {self._rank}: {kind.value} of {tensor.numel()} bytes in {self._space.place} by GPUDirect Storage"
        operation = GdsOperation(kind, extent, tensor, pieces, label)
        with self._lock:
            lane = self._lane(kind)
            for event in after:
                lane.wait(event)
            extent.pending += 1
            self._start(operation, lane.stream.cuda_stream)
            operation.arrived = self._record(lane.stream)
            self._running.append((lane, operation))
        return operation

    def _start(self, operation: GdsOperation, raw_stream: int) -> None:
        for piece in operation.pieces:
            file = self._files[piece.file_index]
            start = file.raw_write_async if operation.kind is Kind.WRITE else file.raw_read_async
            try:
                future = start(operation.tensor, raw_stream, piece.nbytes, piece.file_offset, piece.start)
            except RuntimeError as error:
                operation.fail(piece, error, error)
                return
            operation.futures.append(future)
            operation.files.append(file)
            self.bytes_moved[operation.kind] += piece.nbytes

    def _lane(self, kind: Kind) -> IoStream:
        """A stream with nothing on it: counting the bytes of one operation waits for all that its stream holds."""
        busy = {id(lane) for lane, operation in self._running if not operation.query()}
        for lane, operation in self._running:
            if id(lane) not in busy:
                operation.settle()  # does not wait, and lets go of the tensor
        self._running = [pair for pair in self._running if not pair[1].settled]
        lanes = self._lanes[kind]
        index = next((i for i, lane in enumerate(lanes) if id(lane) not in busy), None)
        if index is None and len(lanes) < _MAX_LANES:
            lanes.append(self._new_stream())
            return lanes[-1]
        lanes.append(lanes.pop(index or 0))  # shared ones in turn
        return lanes[-1]


def _import_kvikio() -> Any:
    try:
        importlib.import_module("kvikio.defaults")  # no attribute of the package until it is imported itself
        return importlib.import_module("kvikio")
    except Exception as error:  # beside ImportError, kvikio raises its own where a CUDA library is missing
        raise ScratchUnusable(f"GPUDirect Storage needs kvikio, which cannot be imported: {error}") from error


def _record(stream: Any) -> Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _own(extent: Extent) -> DiskExtent:
    if not isinstance(extent, DiskExtent):
        raise TypeError(f"{extent!r} is not an extent of a disk store")
    return extent


def _check(extent: DiskExtent, tensor: torch.Tensor, limit: int) -> None:
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
        raise ValueError(f"the disk takes contiguous uint8 tensors, not {tensor.dtype} of strides {tensor.stride()}")
    if extent.released:
        raise SwapError(f"the extent at {extent.offset} was released")
    if not 0 < tensor.numel() <= limit:
        raise ValueError(f"{tensor.numel()} bytes do not fit the {limit} of the extent at {extent.offset}")
