"""The disk tier: reserved ranges of anonymous scratch files, written and read by threads of its own (rule R9).

Owns the files, the division of their space, and the I/O threads. Several directories are striped block by block: byte
L of the space is in file (L / block) mod n. Reserved space is allocated on the file system before it is written, so a
full disk shows at `DiskStore(...)` or `reserve`, hardly ever in a write. Scratch is disposable: no fsync, no format,
nothing on disk is ever parsed; a process that dies leaves nothing.

    reserve ──▶ write ──▶ read (any number) ──▶ release        events order; extents never overlap
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from memo.errors import ScratchFull, SwapError
from memo.swap.backend import Event, Extent
from memo.swap.diskop import DiskExtent, DiskOperation, Kind, Piece
from memo.swap.freelist import FreeList
from memo.swap.iopool import IoPool
from memo.swap.rawfile import BLOCK_ALIGN, NO_SPACE, RawFile, error_name
from memo.swap.transfer import Transfer
from memo.units import format_bytes

__all__ = ["DiskStats", "DiskStore"]

_GROWTH_BYTES = 1 << 30
_EXIT_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """Counters of a store since it was made."""

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    bytes_written: int
    """As sent to the device, in whole blocks: what wears it."""
    bytes_read: int
    write_errors: int
    read_errors: int
    read_retries: int
    write_busy_s: float
    """Time during which at least one write was running."""
    read_busy_s: float


class DiskStore:
    """A `memo.swap.backend.Disk` over anonymous O_DIRECT files, one in each directory.

    `capacity` is a hard budget over all directories, allocated at once; None grows on demand and leaves `spare_bytes`
    free on each file system. `rank` appears in messages only.

    Raises:
        ScratchUnusable: a directory is missing, not writable, or unsafe.
        ScratchFull: the file systems do not have `capacity` bytes. Either way nothing is left open.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        capacity: int | None,
        *,
        block_bytes: int = 4 << 20,
        threads: int = 2,
        verify: bool = False,
        rank: int = 0,
        spare_bytes: int = 1 << 30,
        stall_warning_s: float = 30.0,
        open_file: Callable[[Path], RawFile] = RawFile,
    ) -> None:
        if not directories:
            raise ValueError("a disk store needs at least one directory")
        if block_bytes <= 0 or block_bytes % BLOCK_ALIGN:
            raise ValueError(f"block_bytes must be a multiple of {BLOCK_ALIGN}, is {block_bytes}")
        if threads < 1:
            raise ValueError(f"a disk store needs at least one thread, not {threads}")
        self.block_bytes = block_bytes
        self._growing = capacity is None
        self._spare_bytes = spare_bytes
        self._stall_warning_s = stall_warning_s
        paths = [Path(directory) for directory in directories]
        self._place = ", ".join(map(str, paths))
        self._rank = rank
        self._space = FreeList(0, align=BLOCK_ALIGN)
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            self._files = []
            for path in paths:
                file = open_file(path)
                undo.callback(file.close)
                self._files.append(file)
            if capacity:
                self._preallocate(capacity - capacity % BLOCK_ALIGN)
            self._transfer = Transfer(self._files, verify=verify)
            self._pool = IoPool(threads * len(paths), self._transfer.run, bounce_bytes=block_bytes)
            undo.pop_all()
        # Runs at close, when the store is dropped, or at interpreter exit, whichever comes first.
        self._shut_down = weakref.finalize(self, _shut_down, self._pool, self._files, _EXIT_WAIT_S)

    @property
    def stats(self) -> DiskStats:
        """A snapshot of the counters."""
        moved, errors, busy_ns = self._transfer.bytes_moved, self._transfer.errors, self._pool.busy_ns
        return DiskStats(
            capacity_bytes=self._space.capacity,
            used_bytes=self._space.used,
            peak_bytes=self._space.peak,
            bytes_written=moved[Kind.WRITE],
            bytes_read=moved[Kind.READ],
            write_errors=errors[Kind.WRITE],
            read_errors=errors[Kind.READ],
            read_retries=self._transfer.read_retries,
            write_busy_s=busy_ns[Kind.WRITE] / 1e9,
            read_busy_s=busy_ns[Kind.READ] / 1e9,
        )

    def reserve(self, nbytes: int) -> DiskExtent | None:
        """A range of at least `nbytes`, or None when the budget, or the file system, is used up."""
        self._check_alive()
        with self._lock:
            offset = self._space.allocate(nbytes)
            if offset is None and self._growing and self._grow(nbytes):
                offset = self._space.allocate(nbytes)
        return None if offset is None else DiskExtent(offset, -(-nbytes // BLOCK_ALIGN) * BLOCK_ALIGN)

    def release(self, extent: Extent) -> None:
        """Gives the range back.

        Raises:
            SwapError: an operation on it is pending, or it was released before; nothing changes.
        """
        extent = _own(extent)
        with self._lock:
            if extent.pending:
                raise SwapError(
                    f"the extent at {extent.offset} is released while {extent.pending} operations run on it"
                )
            if extent.released:
                raise SwapError(f"the extent at {extent.offset} is released twice")
            extent.released = True
            self._space.free(extent.offset)

    def write(self, extent: Extent, source: torch.Tensor, *, after: Sequence[Event] = ()) -> DiskOperation:
        """Writes all of `source` to the start of `extent` once `after` is done."""
        extent = _own(extent)
        self._check(extent, source, extent.nbytes)
        extent.written_bytes = source.numel()
        return self._submit(Kind.WRITE, extent, source, after)

    def read(self, extent: Extent, target: torch.Tensor, *, after: Sequence[Event] = ()) -> DiskOperation:
        """Fills `target` with what was written to `extent`; all of it when the store verifies."""
        extent = _own(extent)
        self._check(extent, target, extent.written_bytes)
        if self._transfer.verify and target.numel() != extent.written_bytes:
            raise ValueError(f"a verified read takes all {extent.written_bytes} bytes, not {target.numel()}")
        return self._submit(Kind.READ, extent, target, after)

    def close(self) -> None:
        """Waits for running operations, fails those not begun, ends the threads, closes the files. Idempotent."""
        if self._shut_down.detach() is not None:
            _shut_down(self._pool, self._files, None)

    def _check_alive(self) -> None:
        if not self._pool.alive:
            raise SwapError("the disk store is closed, or belongs to the process that this one was forked from")

    def _check(self, extent: DiskExtent, tensor: torch.Tensor, limit: int) -> None:
        self._check_alive()
        if tensor.device.type != "cpu" or tensor.dtype != torch.uint8 or not tensor.is_contiguous():
            raise ValueError(
                f"the disk takes contiguous uint8 tensors on the CPU, not {tensor.dtype} on {tensor.device}"
            )
        if extent.released:
            raise SwapError(f"the extent at {extent.offset} was released")
        if not 0 < tensor.numel() <= limit:
            raise ValueError(f"{tensor.numel()} bytes do not fit the {limit} of the extent at {extent.offset}")

    def _submit(self, kind: Kind, extent: DiskExtent, tensor: torch.Tensor, after: Sequence[Event]) -> DiskOperation:
        operation = DiskOperation(
            kind,
            extent,
            tensor,
            pieces=self._split(extent.offset, tensor.numel()),
            after=after,
            rank=self._rank,
            place=self._place,
            cancel_with=self._pool.cancel,
            stall_warning_s=self._stall_warning_s,
        )
        self._pool.submit(operation)
        return operation

    def _split(self, offset: int, nbytes: int) -> list[Piece]:
        """Pieces that end at block boundaries of the space, so that each lies in one file."""
        pieces, start = [], 0
        while start < nbytes:
            block, within = divmod(offset + start, self.block_bytes)
            row, index = divmod(block, len(self._files))
            length = min(self.block_bytes - within, nbytes - start)
            pieces.append(
                Piece(
                    start=start,
                    nbytes=length,
                    file_index=index,
                    file_offset=row * self.block_bytes + within,
                )
            )
            start += length
        return pieces

    def _file_bytes(self, capacity: int, index: int) -> int:
        """Length of file `index` when the space has `capacity` bytes."""
        rows, rest = divmod(capacity, self.block_bytes * len(self._files))
        return rows * self.block_bytes + min(max(rest - index * self.block_bytes, 0), self.block_bytes)

    def _preallocate(self, capacity: int) -> None:
        for index, file in enumerate(self._files):
            needed = self._file_bytes(capacity, index)
            free = file.free_bytes()
            try:
                # Asked first: allocating terabytes only to find the end takes long, and starves others meanwhile.
                if needed > free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if needed:
                    file.fallocate(needed)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                raise ScratchFull(
                    f"cannot reserve {format_bytes(needed)} of scratch in {file.directory}: {error_name(error)};"
                    f" {format_bytes(free)} are free; lower the disk budget or give another directory"
                ) from error
        self._space.extend(capacity)

    def _grow(self, nbytes: int) -> bool:
        """Extends the files for `nbytes` more, in large steps while the file system has room for them."""
        stripe = self.block_bytes * len(self._files)
        for step in (max(nbytes, _GROWTH_BYTES), nbytes):
            capacity = self._space.capacity + -(-step // stripe) * stripe
            if self._extend_files(capacity):
                self._space.extend(capacity - self._space.capacity)
                return True
        return False

    def _extend_files(self, capacity: int) -> bool:
        for index, file in enumerate(self._files):
            needed = self._file_bytes(capacity, index)
            more = needed - self._file_bytes(self._space.capacity, index)
            if file.free_bytes() - more < self._spare_bytes:
                return False
            try:
                if more:
                    file.fallocate(needed)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                return False
        return True


def _own(extent: Extent) -> DiskExtent:
    if not isinstance(extent, DiskExtent):
        raise TypeError(f"{extent!r} is not an extent of a disk store")
    return extent


def _shut_down(pool: IoPool, files: Sequence[RawFile], timeout_s: float | None) -> None:
    if pool.close(timeout_s):
        for file in files:
            file.close()
