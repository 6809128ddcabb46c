"""Scratch space of the disk tier: one file in each directory, used as one striped range of bytes.

Owns the files and the allocation of extents, not the transfers. Directories are striped block by block: byte L of the
space is in file (L / block) mod n. Blocks are allocated on the file system before an extent is handed out, so a full
disk is detected at construction or in `reserve`, hardly ever by a write.

From the second step on, extents are placed by a plan of the first step's lifetimes (memo.swap.memory.planned_layout); a
step ends when no extent is held. Requests that do not follow the plan are served by first fit.

A directory whose file failed a transfer takes no more bytes, where others remain: for the rest of the step its pieces go to
a second file in one of these, and from the next step on extents are striped over these alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from memo.errors import ScratchFull, ScratchUnusable, SwapError
from memo.forks import free_in_child
from memo.swap.disk.operation import DiskExtent, Piece
from memo.swap.disk.raw_file import BLOCK_ALIGN, NO_SPACE, RawFile, error_name
from memo.swap.memory.free_list import FreeList
from memo.swap.memory.planned_layout import StepRecorder
from memo.units import format_bytes
from memo.warn_user import warn_user

_GROWTH_BYTES = 1 << 30


class ScratchSpace:
    """Allocator of extents over anonymous files. Thread-safe.

    Args:
        directories: One file is created in each.
        capacity: Byte budget over all directories, preallocated; None grows on demand.
        block_bytes: Stripe size, a multiple of BLOCK_ALIGN.
        spare_bytes: Bytes left free on each file system when growing on demand.
        open_file: Creates the file of a directory.

    Raises:
        ScratchUnusable: A directory is missing, not writable, or unsafe.
        ScratchFull: The file systems do not have `capacity` bytes. Either way nothing is left open.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        capacity: int | None,
        *,
        block_bytes: int,
        spare_bytes: int,
        open_file: Callable[[Path], RawFile],
    ) -> None:
        if not directories:
            raise ValueError("a disk store needs at least one directory")
        if block_bytes <= 0 or block_bytes % BLOCK_ALIGN:
            raise ValueError(f"block_bytes must be a multiple of {BLOCK_ALIGN}, is {block_bytes}")
        paths = [Path(directory) for directory in directories]
        self.files: list[RawFile] = []
        self._block_bytes = block_bytes
        self._open_file = open_file
        self._overflow: dict[int, tuple[int, FreeList]] = {}  # second files, by the index of their directory's first
        self._growing = capacity is None
        self._budget = 0 if capacity is None else capacity - capacity % BLOCK_ALIGN
        self.refusal: str | None = None
        """Why there was no more room at the latest request that found none."""
        self._failed: dict[int, str] = {}  # errors of files, by index; they are left out when no extent is held
        self._peak_before = 0  # of striping over more files
        self._spare_bytes = spare_bytes
        self._free = FreeList(0, align=BLOCK_ALIGN)
        self._recorder = StepRecorder()
        self._extents: weakref.WeakValueDictionary[int, DiskExtent] = weakref.WeakValueDictionary()  # by offset
        self._lock = free_in_child(threading.Lock())
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for path in paths:
                self.files.append(open_file(path))
            self._striped = list(range(len(paths)))  # indices of the files in use
            if self._budget:
                self._preallocate(self._budget)
            undo.pop_all()

    @property
    def place(self) -> str:
        """The directories in use."""
        return ", ".join(str(self.files[index].directory) for index in self._striped)

    @property
    def capacity(self) -> int:
        """Bytes allocated on the file systems."""
        return self._free.capacity

    @property
    def used(self) -> int:
        """Bytes in reserved extents that are neither released nor lost."""
        with self._lock:
            self._free.keep(self._extents)
            return self._free.used

    @property
    def peak(self) -> int:
        """Largest `used` so far."""
        return max(self._free.peak, self._peak_before)

    def file_failed(self, index: int, error: str) -> None:
        """Leaves a file out, where others remain; `error` says why in the warning."""
        with self._lock:
            for first, (second, _) in self._overflow.items():
                if index == second:
                    self._failed.setdefault(first, error)
            self._failed.setdefault(index, error)

    def elsewhere(self, piece: Piece) -> Piece | None:
        """Returns the place of a piece whose file has failed; None if it has not, or no other has room.

        The piece's own place stays unused, so the bytes held are within the budget.
        """
        if piece.file_index not in self._failed:
            return None
        with self._lock:
            good = [index for index in self._striped if index not in self._failed]
            for first in sorted(
                good, key=lambda index: self._overflow[index][1].used if index in self._overflow else 0
            ):
                try:
                    if first not in self._overflow:
                        self.files.append(self._open_file(self.files[first].directory))
                        self._overflow[first] = len(self.files) - 1, FreeList(0, align=BLOCK_ALIGN)
                    index, free = self._overflow[first]
                    offset = free.allocate(piece.nbytes)
                    if offset is None:
                        self._extend_overflow(self.files[index], free, piece.nbytes)
                        offset = free.allocate(piece.nbytes)
                except (OSError, SwapError):
                    continue
                if offset is not None:
                    return Piece(start=piece.start, nbytes=piece.nbytes, file_index=index, file_offset=offset)
            return None

    def _extend_overflow(self, file: RawFile, free: FreeList, nbytes: int) -> None:
        """Extends a second file by `nbytes`, rounded up, where its file system has room for them."""
        nbytes = -(-nbytes // BLOCK_ALIGN) * BLOCK_ALIGN
        if file.free_bytes() - nbytes >= (self._spare_bytes if self._growing else 0):
            file.fallocate(free.capacity + nbytes)
            free.extend(nbytes)

    def reserve(self, nbytes: int) -> DiskExtent | None:
        """Reserves at least `nbytes`; None when the budget or the file system is used up."""
        if nbytes <= 0:
            raise ValueError(f"cannot reserve {nbytes} bytes")
        with self._lock:
            self._free.keep(self._extents)
            if not self._extents:
                if self._failed:
                    self._leave_out_failed()
                self._recorder.end_step(BLOCK_ALIGN, self._free.capacity)
            number, offset = self._recorder.find(self._free, nbytes)
            if offset is None and self._growing and self._grow(nbytes):
                offset = self._free.allocate(nbytes)
            if offset is None:
                if not self._growing:
                    self.refusal = f"{format_bytes(self._free.capacity)} of scratch in {self.place} are used up"
                return None
            extent = DiskExtent(offset, -(-nbytes // BLOCK_ALIGN) * BLOCK_ALIGN, (number, self._recorder.step))
            self._extents[offset] = extent
        return extent

    def release(self, extent: DiskExtent) -> None:
        """Releases the range.

        Raises:
            SwapError: An operation on it is pending, or it was already released; nothing changes.
        """
        with self._lock:
            if extent.pending:
                raise SwapError(
                    f"the extent at {extent.offset} is released while {extent.pending} operations run on it"
                )
            if extent.released:
                raise SwapError(f"the extent at {extent.offset} is released twice")
            extent.released = True
            # A collection of garbage that found its owner in a cycle has cleared the weak reference: it counts as lost, and
            # its room may be another's by now.
            if self._extents.get(extent.offset) is extent:
                self._free.free(extent.offset)
                self._recorder.release(*extent.claim)
                del self._extents[extent.offset]
                free = dict(self._overflow.values())
                for piece in extent.moved.values():
                    free[piece.file_index].free(piece.file_offset)

    def close(self) -> None:
        """Closes the files. Idempotent."""
        for file in self.files:
            file.close()

    def split(self, offset: int, nbytes: int) -> list[Piece]:
        """Splits a range at block boundaries of the space, so that each piece lies in one file."""
        pieces, start = [], 0
        while start < nbytes:
            block, within = divmod(offset + start, self._block_bytes)
            row, position = divmod(block, len(self._striped))
            length = min(self._block_bytes - within, nbytes - start)
            pieces.append(
                Piece(
                    start=start,
                    nbytes=length,
                    file_index=self._striped[position],
                    file_offset=row * self._block_bytes + within,
                )
            )
            start += length
        return pieces

    def _file_bytes(self, capacity: int, position: int) -> int:
        """Length of the file at `position` among those in use, for a space of `capacity` bytes."""
        rows, rest = divmod(capacity, self._block_bytes * len(self._striped))
        return rows * self._block_bytes + min(max(rest - position * self._block_bytes, 0), self._block_bytes)

    def _leave_out_failed(self) -> None:
        """Stripes over the files that have not failed, up to the budget where there is room. Nothing is held now."""
        failed, self._failed = self._failed, {}
        overflow, self._overflow = self._overflow, {}
        for second, _ in overflow.values():
            self.files[second].close()
        left = [index for index in self._striped if index not in failed]
        if not left or len(left) == len(self._striped):
            return  # the last ones are tried again
        rows = min(self._file_bytes(self._free.capacity, self._striped.index(index)) for index in left)
        rows //= self._block_bytes
        for index in set(self._striped) - set(left):
            self.files[index].close()
        self._striped, self._peak_before = left, self.peak
        self._free = FreeList(rows * self._block_bytes * len(left), align=BLOCK_ALIGN)
        self._recorder = StepRecorder()
        if not self._growing and self._extend_files(self._budget):
            self._free.extend(self._budget - self._free.capacity)
        errors = "; ".join(dict.fromkeys(failed.values()))
        warn_user(
            f"{errors}. This directory is not used any more: {format_bytes(self._free.capacity)} of"
            f" scratch remain in {self.place}. A new manager would try it again"
        )

    def _preallocate(self, capacity: int) -> None:
        for index, file in enumerate(self.files):
            needed = self._file_bytes(capacity, index)
            free = file.free_bytes()
            try:
                # Checked first: allocating until the disk is full takes long and leaves no space to others meanwhile.
                if needed > free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if needed:
                    file.fallocate(needed)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise _unusable(file, needed, error) from error
                raise ScratchFull(
                    f"cannot reserve {format_bytes(needed)} of scratch in {file.directory}: {error_name(error)};"
                    f" {format_bytes(free)} are free; lower the disk budget or give another directory"
                ) from error
        self._free.extend(capacity)

    def _grow(self, nbytes: int) -> bool:
        """Extends the files by at least `nbytes`, in large steps while the file systems have room for them."""
        stripe = self._block_bytes * len(self._striped)
        for step in (max(nbytes, _GROWTH_BYTES), nbytes):
            capacity = self._free.capacity + -(-step // stripe) * stripe
            if self._extend_files(capacity):
                self._free.extend(capacity - self._free.capacity)
                return True
        return False

    def _extend_files(self, capacity: int) -> bool:
        for position, index in enumerate(self._striped):
            if index in self._failed:
                continue  # its pieces go elsewhere
            file = self.files[index]
            needed = self._file_bytes(capacity, position)
            more = needed - self._file_bytes(self._free.capacity, position)
            free = file.free_bytes()
            if free - more < self._spare_bytes:
                left = format_bytes(self._spare_bytes)
                self.refusal = f"{file.directory} has {format_bytes(free)} free, of which memo leaves {left}"
                return False
            try:
                if more:
                    file.fallocate(needed)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    unusable = _unusable(file, needed, error)
                    self._failed[index] = str(unusable)
                    if len(self._failed.keys() & set(self._striped)) == len(self._striped):
                        raise unusable from error
                    continue
                self.refusal = f"{file.directory} does not take a file of {format_bytes(needed)}: {error_name(error)}"
                return False
        self.refusal = None
        return True


def _unusable(file: RawFile, nbytes: int, error: OSError) -> ScratchUnusable:
    return ScratchUnusable(
        f"scratch directory {file.directory} does not take a file of {format_bytes(nbytes)}: {error_name(error)};"
        " check that drive (dmesg, smartctl), or give another directory"
    )
