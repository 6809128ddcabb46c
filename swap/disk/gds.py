"""Disk tier by GPUDirect Storage (GDS): transfers between GPU memory and disk through kvikio's stream-ordered calls.

Uses the same scratch space as `memo.swap.disk.store`, no host memory and no threads: each operation is issued on a
stream of its own, after the events it depends on. Used only where `memo doctor` finds GDS working: elsewhere kvikio
falls back to calls that block the caller, and the forward must never block.

Success of an operation is known only from its byte count; its CUDA event fires whether or not the bytes arrived. The
host therefore waits for that event and checks the count. The event is never passed to a stream.
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
from memo.swap.disk.operation import DiskExtent, OperationKind, Piece, check_fits
from memo.swap.disk.raw_file import RawFile
from memo.swap.disk.scratch import ScratchSpace

if TYPE_CHECKING:
    from memo.swap.backends.protocol import Event

_READ_RETRIES = 2
_MAX_LANES = 16  # streams in each direction; further operations share them round-robin


class IoStream(Protocol):
    """Part of the CUDA backend's copy stream that GdsDisk uses."""

    @property
    def stream(self) -> Any:
        """Underlying torch stream; `cuda_stream` is its raw handle."""

    def wait(self, event: Event) -> None:
        """Orders all later work of the stream after `event`."""


class GdsOperation:
    """Implements `memo.swap.backends.Timed`. Keeps the tensor and the futures alive until the bytes are counted."""

    def __init__(
        self, kind: OperationKind, extent: DiskExtent, tensor: torch.Tensor, pieces: Sequence[Piece], label: str
    ):
        self.kind = kind
        self.extent = extent
        self.tensor: torch.Tensor | None = tensor
        self.pieces = pieces
        self.label = label
        self.futures: list[Any] = []
        self.files: list[Any] = []
        self.arrived: Event | None = None
        """Event recorded after the operation on its stream; None before the operation was issued."""
        self.failure: tuple[type[MemoError], str, BaseException | None] | None = None
        self.settled = False
        self._lock = threading.Lock()

    def query(self) -> bool:
        """Returns True once the stream has passed the operation."""
        return self.settled or self.arrived is None or self.arrived.query()

    def synchronize(self) -> None:
        """Waits for the transfer and checks its byte count.

        Raises:
            StoreWriteError, StoreReadError: Fewer bytes arrived; a read's target holds garbage.
        """
        self.settle()
        if self.failure is not None:
            error, message, cause = self.failure
            raise error(message) from cause

    def interval_ns(self) -> tuple[int, int] | None:
        """Returns None: transfers are not timed."""
        return None

    def cancel(self) -> bool:
        """Returns False: work issued on a stream cannot be cancelled."""
        return False

    def fail(self, piece: Piece, reason: object, cause: BaseException | None) -> None:
        """Records the first failure, for `synchronize` to raise."""
        if self.failure is None:
            message = f"{self.label}: {piece.nbytes} bytes at {piece.file_offset} failed: {reason}"
            self.failure = (self.kind.error, message, cause)

    def settle(self) -> None:
        """Waits for the transfer, checks the count and drops the tensor; keeps a failure for `synchronize`."""
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
        for attempt in range(1 + (_READ_RETRIES if self.kind is OperationKind.READ else 0)):
            cause: RuntimeError | None = None
            try:
                moved = int(count())
                if moved == piece.nbytes:
                    return
                reason = f"{moved} bytes arrived"
            except RuntimeError as error:  # the only exception type of kvikio; carries no errno
                reason, cause = str(error), error
            if attempt < _READ_RETRIES:
                count = lambda: file.raw_read(self.tensor, piece.nbytes, piece.file_offset, piece.start)  # noqa: E731
        self.fail(piece, reason, cause)


class GdsDisk:
    """Implements `memo.swap.backends.Disk` for tensors in the memory of one GPU.

    Args:
        directories: One scratch file is created in each.
        capacity: Byte budget over all directories, preallocated; None grows on demand.
        new_stream: Creates a copy stream of that GPU.
        record: Records an event on a torch stream.
        block_bytes: Stripe size and largest piece.
        spare_bytes: Bytes left free on each file system when growing on demand.
        kvikio: Module to use in place of the installed one.
        open_file: Creates the scratch file of a directory.

    Raises:
        ScratchUnusable, ScratchFull: As ScratchSpace; also when kvikio is missing or would not use GDS. Nothing is
            left open.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        capacity: int | None,
        *,
        new_stream: Callable[[], IoStream],
        record: Callable[[Any], Event] | None = None,
        block_bytes: int = 16 << 20,
        spare_bytes: int = 1 << 30,
        kvikio: Any = None,
        open_file: Callable[[Path], RawFile] = RawFile,
    ) -> None:
        library = _import_kvikio() if kvikio is None else kvikio
        if library.defaults.is_compat_mode_preferred():
            raise ScratchUnusable("kvikio would not use GPUDirect Storage here; `memo doctor` tells why")
        self._new_stream = new_stream
        self._record = _record if record is None else record
        self._lock = threading.Lock()
        self._lanes: dict[OperationKind, list[IoStream]] = {kind: [] for kind in OperationKind}
        self._running: list[tuple[IoStream, GdsOperation]] = []
        self._space = ScratchSpace(
            directories, capacity, block_bytes=block_bytes, spare_bytes=spare_bytes, open_file=open_file
        )
        self._files: list[Any] = []
        self.bytes_moved = dict.fromkeys(OperationKind, 0)
        try:
            for file in self._space.files:
                # kvikio opens by path, and the file is unnamed: use its descriptor's. "r+", since "w" truncates.
                self._files.append(library.CuFile(f"/proc/self/fd/{file.fd}", "r+"))
        except BaseException as error:
            self._close_files()
            if isinstance(error, RuntimeError):
                raise ScratchUnusable(f"GPUDirect Storage does not take {self._space.place}: {error}") from error
            raise

    def reserve(self, nbytes: int) -> DiskExtent | None:
        """Reserves at least `nbytes`; None when the budget or the file system is used up."""
        return self._space.reserve(nbytes)

    @property
    def refusal(self) -> str | None:
        """Why the file system gave no more, if it was that."""
        return self._space.refusal

    def release(self, extent: DiskExtent) -> None:
        """Releases the range.

        Raises:
            SwapError: An operation on it is pending, or it was already released; nothing changes.
        """
        with self._lock:
            for _, operation in self._running:
                if operation.extent is extent and operation.query():
                    operation.settle()
        self._space.release(extent)

    def write(self, extent: DiskExtent, source: torch.Tensor, *, after: Sequence[Event] = ()) -> GdsOperation:
        """Writes all of `source` to the start of `extent` once `after` is done."""
        check_fits(extent, source, extent.nbytes)
        extent.written_bytes = source.numel()
        return self._issue(OperationKind.WRITE, extent, source, after)

    def read(self, extent: DiskExtent, target: torch.Tensor, *, after: Sequence[Event] = ()) -> GdsOperation:
        """Fills `target` with what was written to `extent`."""
        check_fits(extent, target, extent.written_bytes)
        return self._issue(OperationKind.READ, extent, target, after)

    def close(self) -> None:
        """Waits for every operation and closes the files. Idempotent; failures stay with their operations."""
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

    def _issue(
        self, kind: OperationKind, extent: DiskExtent, tensor: torch.Tensor, after: Sequence[Event]
    ) -> GdsOperation:
        if not self._files:
            raise SwapError("the disk store is closed")
        pieces = self._space.split(extent.offset, tensor.numel())
        label = f"{kind.value} of {tensor.numel()} bytes in {self._space.place} by GPUDirect Storage"
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
            start = file.raw_write_async if operation.kind is OperationKind.WRITE else file.raw_read_async
            try:
                future = start(operation.tensor, raw_stream, piece.nbytes, piece.file_offset, piece.start)
            except RuntimeError as error:
                operation.fail(piece, error, error)
                return
            operation.futures.append(future)
            operation.files.append(file)
            self.bytes_moved[operation.kind] += piece.nbytes

    def _lane(self, kind: OperationKind) -> IoStream:
        """An idle stream: checking the byte count of one operation waits for everything on its stream."""
        busy = {id(lane) for lane, operation in self._running if not operation.query()}
        for lane, operation in self._running:
            if id(lane) not in busy:
                operation.settle()  # already done: does not wait, and drops the tensor
        self._running = [pair for pair in self._running if not pair[1].settled]
        lanes = self._lanes[kind]
        index = next((i for i, lane in enumerate(lanes) if id(lane) not in busy), None)
        if index is None and len(lanes) < _MAX_LANES:
            lanes.append(self._new_stream())
            return lanes[-1]
        lanes.append(lanes.pop(index or 0))  # all busy: round-robin
        return lanes[-1]


def _import_kvikio() -> Any:
    try:
        importlib.import_module("kvikio.defaults")  # `import kvikio` alone does not import it
        return importlib.import_module("kvikio")
    except Exception as error:  # ImportError, or kvikio's own where a CUDA library is missing
        raise ScratchUnusable(f"GPUDirect Storage needs kvikio, which cannot be imported: {error}") from error


def _record(stream: Any) -> Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
