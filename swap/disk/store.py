"""Disk store for host tensors: extents of anonymous scratch files, written and read by its own threads (rule R9).

Combines the scratch space (allocation), the transfer of a piece, and the I/O threads. Scratch is disposable: no fsync,
no file format, nothing on disk is ever parsed; a process that dies leaves no files.

    reserve ──▶ write ──▶ read (any number) ──▶ release        events order; extents never overlap
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from memo import forks
from memo.errors import SwapError
from memo.swap.backends.protocol import Event
from memo.swap.disk.io_threads import IoPool
from memo.swap.disk.operation import DiskExtent, DiskOperation, OperationKind, check_fits
from memo.swap.disk.raw_file import RawFile
from memo.swap.disk.scratch import ScratchSpace
from memo.swap.disk.transfer import Transfer

_EXIT_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """Counters of a store since its construction."""

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    bytes_written: int
    """Whole blocks as sent to the device, which is what wears it."""
    bytes_read: int
    write_errors: int
    read_errors: int
    read_retries: int
    write_busy_s: float
    """Time with at least one write running."""
    read_busy_s: float


class DiskStore:
    """Implements `memo.swap.backends.Disk` over anonymous O_DIRECT files, one in each directory.

    A directory whose file fails a transfer takes no more bytes, where others remain, and the failed write goes to one of
    them.

    Args:
        directories: One scratch file is created in each; they are striped.
        capacity: Byte budget over all directories, preallocated; None grows on demand.
        block_bytes: Stripe size and largest piece.
        threads: I/O threads for each directory.
        verify: Keep a checksum of each piece in RAM and compare it after each read.
        spare_bytes: Bytes left free on each file system when growing on demand.
        stall_warning_s: `synchronize` warns after waiting this long.
        open_file: Creates the scratch file of a directory.

    Raises:
        ScratchUnusable: A directory is missing, not writable, or unsafe.
        ScratchFull: The file systems do not have `capacity` bytes.
        SwapError: The system starts no more threads. In each case nothing is left open.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        capacity: int | None,
        *,
        block_bytes: int = 4 << 20,
        threads: int = 4,
        verify: bool = False,
        spare_bytes: int = 1 << 30,
        stall_warning_s: float = 30.0,
        open_file: Callable[[Path], RawFile] = RawFile,
    ) -> None:
        if threads < 1:
            raise ValueError(f"a disk store needs at least one thread, not {threads}")
        self._stall_warning_s = stall_warning_s
        self._space = ScratchSpace(
            directories, capacity, block_bytes=block_bytes, spare_bytes=spare_bytes, open_file=open_file
        )
        self._transfer = Transfer(self._space, verify=verify)
        try:
            self._pool = IoPool(threads * len(directories), self._transfer.run, bounce_bytes=block_bytes)
        except BaseException:
            self._space.close()
            raise
        # Runs at close, when the store is collected, or at interpreter exit, whichever comes first.
        self._shut_down = weakref.finalize(self, _shut_down, self._pool, self._space, _EXIT_WAIT_S)

    @property
    def stats(self) -> DiskStats:
        """A snapshot of the counters."""
        moved, errors, busy_ns = self._transfer.bytes_moved, self._transfer.errors, self._pool.busy_ns
        return DiskStats(
            capacity_bytes=self._space.capacity,
            used_bytes=self._space.used,
            peak_bytes=self._space.peak,
            bytes_written=moved[OperationKind.WRITE],
            bytes_read=moved[OperationKind.READ],
            write_errors=errors[OperationKind.WRITE],
            read_errors=errors[OperationKind.READ],
            read_retries=self._transfer.read_retries,
            write_busy_s=busy_ns[OperationKind.WRITE] / 1e9,
            read_busy_s=busy_ns[OperationKind.READ] / 1e9,
        )

    def reserve(self, nbytes: int) -> DiskExtent | None:
        """Reserves at least `nbytes`; None when the budget or the file system is used up."""
        self._check_alive()
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
        self._space.release(extent)

    def write(self, extent: DiskExtent, source: torch.Tensor, *, after: Sequence[Event] = ()) -> DiskOperation:
        """Writes all of `source` to the start of `extent` once `after` is done."""
        self._check(extent, source, extent.nbytes)
        extent.written_bytes = source.numel()
        return self._submit(OperationKind.WRITE, extent, source, after)

    def read(self, extent: DiskExtent, target: torch.Tensor, *, after: Sequence[Event] = ()) -> DiskOperation:
        """Fills `target` from the start of `extent`. A verifying store takes only reads of all that was written."""
        self._check(extent, target, extent.written_bytes)
        if self._transfer.verify and target.numel() != extent.written_bytes:
            raise ValueError(f"a verified read takes all {extent.written_bytes} bytes, not {target.numel()}")
        return self._submit(OperationKind.READ, extent, target, after)

    def close(self) -> None:
        """Completes running operations, fails the others, ends the threads and closes the files. Idempotent."""
        if self._shut_down.detach() is not None:
            _shut_down(self._pool, self._space, None)

    def _check_alive(self) -> None:
        forks.require_same(self._pool.forks)
        if not self._pool.alive:
            raise SwapError("the disk store is closed")

    def _check(self, extent: DiskExtent, tensor: torch.Tensor, limit: int) -> None:
        self._check_alive()
        if tensor.device.type != "cpu":
            raise ValueError(f"the disk store takes CPU tensors, not one on {tensor.device}")
        check_fits(extent, tensor, limit)

    def _submit(
        self, kind: OperationKind, extent: DiskExtent, tensor: torch.Tensor, after: Sequence[Event]
    ) -> DiskOperation:
        operation = DiskOperation(
            kind,
            extent,
            tensor,
            pieces=self._space.split(extent.offset, tensor.numel()),
            after=after,
            place=self._space.place,
            cancel_with=self._pool.cancel,
            stall_warning_s=self._stall_warning_s,
        )
        self._pool.submit(operation)
        return operation


def _shut_down(pool: IoPool, space: ScratchSpace, timeout_s: float | None) -> None:
    if pool.close(timeout_s):
        space.close()
