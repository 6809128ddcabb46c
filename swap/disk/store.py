"""The disk tier: reserved ranges of anonymous scratch files, written and read by threads of its own (rule R9).

Puts together the scratch space (who has which bytes), the transfer of one piece, and the I/O threads. Scratch is
disposable: no fsync, no format, nothing on disk is ever parsed; a process that dies leaves nothing.

    reserve ──▶ write ──▶ read (any number) ──▶ release        events order; extents never overlap
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from memo.errors import SwapError
from memo.swap.backends.protocol import Event, Extent
from memo.swap.disk.io_threads import IoPool
from memo.swap.disk.operation import DiskExtent, DiskOperation, Kind
from memo.swap.disk.raw_file import RawFile
from memo.swap.disk.scratch import ScratchSpace
from memo.swap.disk.transfer import Transfer

__all__ = ["DiskStats", "DiskStore"]

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
    """A `memo.swap.backends.protocol.Disk` over anonymous O_DIRECT files, one in each directory.

    `capacity` is a hard budget over all directories, allocated at once; None grows on demand and leaves `spare_bytes`
    free on each file system. Operations are cut into pieces of `block_bytes`, moved by `threads` threads for each
    directory. With `verify` a checksum of each piece is kept in RAM. `rank` appears in messages only.

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
        threads: int = 4,
        verify: bool = False,
        rank: int = 0,
        spare_bytes: int = 1 << 30,
        stall_warning_s: float = 30.0,
        open_file: Callable[[Path], RawFile] = RawFile,
    ) -> None:
        if threads < 1:
            raise ValueError(f"a disk store needs at least one thread, not {threads}")
        self._rank = rank
        self._stall_warning_s = stall_warning_s
        self._space = ScratchSpace(
            directories, capacity, block_bytes=block_bytes, spare_bytes=spare_bytes, open_file=open_file
        )
        self._transfer = Transfer(self._space.files, verify=verify)
        self._pool = IoPool(threads * len(directories), self._transfer.run, bounce_bytes=block_bytes)
        # Runs at close, when the store is dropped, or at interpreter exit, whichever comes first.
        self._shut_down = weakref.finalize(self, _shut_down, self._pool, self._space, _EXIT_WAIT_S)

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
        return self._space.reserve(nbytes)

    def release(self, extent: Extent) -> None:
        """Gives the range back.

        Raises:
            SwapError: an operation on it is pending, or it was released before; nothing changes.
        """
        self._space.release(_own(extent))

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
            _shut_down(self._pool, self._space, None)

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
            pieces=self._space.split(extent.offset, tensor.numel()),
            after=after,
            rank=self._rank,
            place=self._space.place,
            cancel_with=self._pool.cancel,
            stall_warning_s=self._stall_warning_s,
        )
        self._pool.submit(operation)
        return operation


def _own(extent: Extent) -> DiskExtent:
    if not isinstance(extent, DiskExtent):
        raise TypeError(f"{extent!r} is not an extent of a disk store")
    return extent


def _shut_down(pool: IoPool, space: ScratchSpace, timeout_s: float | None) -> None:
    if pool.close(timeout_s):
        space.close()
