"""Transfer of one piece between a tensor and a scratch file: alignment, short transfers, retries, checksums.

O_DIRECT takes whole blocks at aligned addresses. Where a tensor has them the kernel reads or writes its memory
directly; other pieces go through the calling thread's bounce buffer. A piece counts as moved only with its full byte
count. Bytes from the disk are never interpreted; with `verify` their checksum is compared with the one in RAM.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import threading
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from memo.errors import CorruptBlock
from memo.swap.disk.operation import DiskOperation, OperationKind, Piece
from memo.swap.disk.raw_file import BLOCK_ALIGN, NO_SPACE, RawFile, error_name
from memo.swap.memory.page_aligned import Bounce, padded_bytes

if TYPE_CHECKING:
    import torch

    from memo.swap.disk.scratch import ScratchSpace

READ_RETRIES = 2
_RETRY_PAUSE_S = 0.01
_MAX_BARREN = 200  # consecutive calls without a whole block (EINTR, EAGAIN, a few bytes) before the transfer fails
_BARREN_PAUSE_S = 0.001


class Transfer:
    """Transfers pieces of one store and counts bytes, errors and retries. Thread-safe.

    A piece whose write fails goes elsewhere, where the space has another file.
    """

    def __init__(self, space: ScratchSpace, *, verify: bool) -> None:
        self._space = space
        self.verify = verify
        self.bytes_moved = dict.fromkeys(OperationKind, 0)
        self.errors = dict.fromkeys(OperationKind, 0)
        self.read_retries = 0
        self.lock = threading.Lock()

    def run(self, operation: DiskOperation, piece: Piece, bounce: Bounce) -> None:
        """Moves `piece` completely, through `bounce` where O_DIRECT cannot take the tensor's memory.

        Raises:
            StoreWriteError, StoreReadError: The system failed to; a read's part of the tensor holds garbage.
            CorruptBlock: The checksum differs after all retries; likewise.
        """
        tensor, writes, moved = operation.tensor, operation.kind is OperationKind.WRITE, operation.extent.moved
        assert tensor is not None, "an operation keeps its tensor until it is done"
        is_short = piece.start not in moved or moved[piece.start].nbytes < piece.nbytes
        if writes and is_short and not self._place_elsewhere(operation, piece):
            moved.pop(piece.start, None)  # what is next to the shorter piece there is another's
        while True:
            place = moved.get(piece.start, piece)
            file = self._space.files[place.file_index]
            # A read may be shorter than the write that was placed elsewhere.
            place = dataclasses.replace(place, nbytes=piece.nbytes)
            try:
                if writes:
                    return self._write(file, tensor, operation, place, bounce)
                return self._read_with_retries(file, tensor, operation, place, bounce)
            except OSError as error:
                self._count_error(operation.kind)
                where = f"{piece.nbytes} bytes at {place.file_offset} in {file.directory} failed: {error_name(error)}"
                self._space.file_failed(place.file_index, f"{operation.kind.value} of {where}")
                if not (writes and self._place_elsewhere(operation, place)):
                    message = f"{operation.describe()}: {where}; {_advice(error, file)}"
                    raise operation.kind.error(message) from error
            except CorruptBlock:
                self._count_error(operation.kind)
                raise

    def _place_elsewhere(self, operation: DiskOperation, place: Piece) -> bool:
        """Gives a piece whose file has failed another place; False if it has not, or there is none."""
        other = self._space.elsewhere(place)
        if other is not None:
            operation.extent.moved[place.start] = other
        return other is not None

    def _count_error(self, kind: OperationKind) -> None:
        with self.lock:
            self.errors[kind] += 1

    def _write(
        self, file: RawFile, tensor: torch.Tensor, operation: DiskOperation, piece: Piece, bounce: Bounce
    ) -> None:
        data = _direct_view(file, tensor, piece)
        if data is None:
            data = bounce.view[: _whole_blocks(piece.nbytes)]
            ctypes.memmove(bounce.address, tensor.data_ptr() + piece.start, piece.nbytes)
        if self.verify:
            operation.extent.checksums[piece.start] = zlib.crc32(data[: piece.nbytes])
        _move_fully(file.pwrite, data, piece.file_offset, "wrote")
        self._count(OperationKind.WRITE, len(data))

    def _read_with_retries(
        self, file: RawFile, tensor: torch.Tensor, operation: DiskOperation, piece: Piece, bounce: Bounce
    ) -> None:
        for attempt in range(READ_RETRIES + 1):
            try:
                return self._read(file, tensor, operation, piece, bounce)
            except (OSError, CorruptBlock):
                if attempt == READ_RETRIES:
                    raise
                with self.lock:
                    self.read_retries += 1
                time.sleep(_RETRY_PAUSE_S)
        return None

    def _read(
        self, file: RawFile, tensor: torch.Tensor, operation: DiskOperation, piece: Piece, bounce: Bounce
    ) -> None:
        direct = _direct_view(file, tensor, piece)
        data = bounce.view[: _whole_blocks(piece.nbytes)] if direct is None else direct
        _move_fully(file.pread, data, piece.file_offset, "read")
        self._count(OperationKind.READ, len(data))
        if self.verify and zlib.crc32(data[: piece.nbytes]) != operation.extent.checksums.get(piece.start):
            raise CorruptBlock(
                f"{operation.describe()}: {piece.nbytes} bytes at {piece.file_offset} in {file.directory}"
                " are not the bytes that were written; the disk, its controller or its link is faulty"
            )
        if direct is None:
            ctypes.memmove(tensor.data_ptr() + piece.start, bounce.address, piece.nbytes)

    def _count(self, kind: OperationKind, nbytes: int) -> None:
        with self.lock:
            self.bytes_moved[kind] += nbytes


def _advice(error: OSError, file: RawFile) -> str:
    if error.errno in NO_SPACE:
        return f"free space in {file.directory}, or lower the disk budget"
    return f"check that drive (dmesg, smartctl), or take {file.directory} out of disk="


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_ALIGN) * BLOCK_ALIGN


def _direct_view(file: RawFile, tensor: torch.Tensor, piece: Piece) -> memoryview | None:
    """Memory of the tensor for this piece, in whole blocks; None when O_DIRECT would refuse it."""
    address = tensor.data_ptr()
    if (address + piece.start) % file.memory_align:
        return None
    length = _whole_blocks(piece.nbytes)
    if piece.start + length > padded_bytes(address, tensor.numel()):
        return None
    return memoryview((ctypes.c_char * length).from_address(address + piece.start)).cast("B")


def _move_fully(move: Callable[[memoryview, int], int], data: memoryview, offset: int, verb: str) -> None:
    """Repeats `move` until all of `data` is moved; resumes at a block boundary, as O_DIRECT requires.

    Raises:
        OSError: From `move`; EIO at the end of the file or after too many calls without progress.
    """
    done, barren = 0, 0
    while done < len(data):
        try:
            count = move(data[done:], offset + done)
        except (InterruptedError, BlockingIOError) as error:
            count, stopped = 0, error.errno or errno.EIO
        else:
            if count == 0:
                raise OSError(errno.EIO, f"the system {verb} nothing of {len(data) - done} bytes: end of file")
            stopped = errno.EIO
        reached = done + count
        if reached < len(data):
            reached -= reached % BLOCK_ALIGN
        barren = 0 if reached > done else barren + 1
        if barren > _MAX_BARREN:
            raise OSError(stopped, f"{os.strerror(stopped)}; {barren} consecutive calls made no progress")
        if barren:
            time.sleep(_BARREN_PAUSE_S)
        done = reached
