"""Disk tier for device tensors without GPUDirect Storage: device -> pinned staging blocks -> disk, and back.

Two threads, one for each direction, each with its own ring of staging blocks and its own copy stream. A storage is
split into parts of one block; while one block is written to disk the next one is copied from the device. The slower of
the two links sets the rate, and staging memory does not grow with the storage.

    D2H copy    part 0 | part 1 | part 2 ...      a block is reused when its write has ended
    disk               | part 0 | part 1 ...
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from memo.errors import SwapError
from memo.swap.backends.cpu import HostEvent
from memo.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from memo.swap.backends.protocol import CopyStream, Disk, Event


@dataclasses.dataclass(slots=True)
class _Parts:
    """Extent of a StagedDisk: one extent of the underlying disk for each block."""

    nbytes: int
    extents: tuple[Any, ...]
    written: HostEvent | None = None
    """Latest write. A read waits for it: `after` orders uses of the tensor, not of the disk."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """Write or read of one storage, queued for a lane."""

    event: HostEvent
    parts: _Parts
    tensor: torch.Tensor
    after: tuple[Event, ...]


class StagedDisk:
    """Implements `memo.swap.backends.Disk` for device tensors over a disk that takes host tensors.

    Args:
        disk: Underlying store; closed together with this one.
        out: Copy stream for device to host.
        back: Copy stream for host to device.
        empty_host: Allocates the staging memory, uint8, pinned where the device has a bus to cross.
        block_bytes: Bytes of one staging block.
        blocks: Staging blocks in each direction.
    """

    def __init__(
        self,
        disk: Disk[Any],
        out: CopyStream,
        back: CopyStream,
        empty_host: Callable[[int], torch.Tensor],
        *,
        block_bytes: int = 16 << 20,
        blocks: int = 4,
    ) -> None:
        self._disk = disk
        self._block_bytes = block_bytes
        staging = empty_host(2 * blocks * block_bytes)
        ring = [staging[i * block_bytes : (i + 1) * block_bytes] for i in range(2 * blocks)]
        self._lanes = (
            _Lane("memo-stage-out", lambda job: self._run_out(job, out, ring[:blocks])),
            _Lane("memo-stage-in", lambda job: self._run_in(job, back, ring[blocks:])),
        )

    def reserve(self, nbytes: int) -> _Parts | None:
        """Reserves an extent for each block; None, with nothing reserved, when the disk is full."""
        extents: list[Any] = []
        for start in range(0, nbytes, self._block_bytes):
            extent = self._disk.reserve(min(self._block_bytes, nbytes - start))
            if extent is None:
                for taken in extents:
                    self._disk.release(taken)
                return None
            extents.append(extent)
        return _Parts(nbytes, tuple(extents))

    @property
    def refusal(self) -> str | None:
        """Why the file system gave no more, if it was that."""
        return self._disk.refusal

    def release(self, extent: _Parts) -> None:
        """Releases the extents of all blocks."""
        for part in extent.extents:
            self._disk.release(part)

    def write(self, extent: _Parts, source: torch.Tensor, *, after: Sequence[Event] = ()) -> HostEvent:
        """Queues a write of all of `source` after the events of `after`."""
        extent.written = self._lanes[0].put(_Job(HostEvent(), extent, source, tuple(after)))
        return extent.written

    def read(self, extent: _Parts, target: torch.Tensor, *, after: Sequence[Event] = ()) -> HostEvent:
        """Queues a read into `target` after the latest write of `extent` and the events of `after`."""
        return self._lanes[1].put(_Job(HostEvent(), extent, target, tuple(after)))

    def close(self) -> None:
        """Completes the queued jobs, ends the threads and closes the underlying disk."""
        for lane in self._lanes:
            lane.close()
        self._disk.close()

    def _run_out(self, job: _Job, stream: CopyStream, ring: Sequence[torch.Tensor]) -> None:
        for event in job.after:
            stream.wait(event)
        writes: collections.deque[Event] = collections.deque()
        try:
            for number, (part, piece) in enumerate(self._pieces(job)):
                if len(writes) == len(ring):
                    writes.popleft().synchronize()  # latest write of this block, before the copy overwrites it
                block = ring[number % len(ring)][: piece.numel()]
                copied = stream.copy(block, piece)
                writes.append(self._disk.write(part, block, after=(copied,)))
        finally:
            _settle(writes)

    def _run_in(self, job: _Job, stream: CopyStream, ring: Sequence[torch.Tensor]) -> None:
        if job.parts.written is not None:
            job.parts.written.synchronize()
        for event in job.after:
            stream.wait(event)
        reads: collections.deque[tuple[Event, torch.Tensor, torch.Tensor]] = collections.deque()
        copies: collections.deque[Event] = collections.deque()

        def copy_oldest() -> None:
            read, piece, block = reads.popleft()
            read.synchronize()
            copies.append(stream.copy(piece, block))

        try:
            for number, (part, piece) in enumerate(self._pieces(job)):
                if len(reads) + len(copies) == len(ring):  # the oldest block has to be free: read, and copied
                    if not copies:
                        copy_oldest()
                    copies.popleft().synchronize()
                block = ring[number % len(ring)][: piece.numel()]
                reads.append((self._disk.read(part, block), piece, block))
            while reads:
                copy_oldest()
        finally:
            try:
                _settle(collections.deque(read for read, *_ in reads))
            finally:
                _settle(copies)  # after failed reads too: a running copy would write into a freed buffer

    def _pieces(self, job: _Job) -> list[tuple[Any, torch.Tensor]]:
        size = self._block_bytes
        return [(part, job.tensor[i * size : (i + 1) * size]) for i, part in enumerate(job.parts.extents)]


def _settle(events: collections.deque[Event]) -> None:
    """Waits for all events, so that no staging block is in use afterwards; raises the first failure."""
    failure: BaseException | None = None
    while events:
        try:
            events.popleft().synchronize()
        except SwapError as error:
            failure = failure or error
    if failure is not None:
        raise failure


class _Lane:
    """One direction: a thread, started with the first job, that runs jobs in order."""

    def __init__(self, name: str, run: Callable[[_Job], None]) -> None:
        self._name = name
        self._run = run
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: _Job) -> HostEvent:
        if self._thread is None or self._thread.ident is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            start_thread(self._thread)
        self._jobs.put(job)
        return job.event

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.event.start():
                begin = time.monotonic_ns()
                failure: BaseException | None = None
                try:
                    self._run(job)
                except BaseException as error:
                    failure = error
                event = job.event
                del job  # this thread must not keep the tensor alive until the next job
                event.finish(begin, failure)

    def close(self) -> None:
        if self._thread is not None and self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
