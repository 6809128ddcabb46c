"""The disk tier of a device that the disk cannot reach by itself: device -> page-locked blocks -> disk, and back.

Two threads, one out and one in, each with its own ring of staging blocks and its own copy stream. A storage is cut into
parts of one block each; while one block is written to disk the next is copied from the device, so the slower of the two
links sets the pace and staging memory does not grow with the storage.

    out    copy part 0 | copy part 1 | copy part 2 ...      a block is reused when its write has ended
    disk               | write 0     | write 1 ...
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from typing import TYPE_CHECKING

from memo.errors import SwapError
from memo.swap.backends.cpu import HostEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from memo.swap.backends.protocol import CopyStream, Disk, Event, Extent

__all__ = ["StagedDisk"]


@dataclasses.dataclass(slots=True)
class _Parts:
    nbytes: int
    extents: tuple[Extent, ...]
    written: HostEvent | None = None
    """The latest write: `after` is about the tensor, and a read of the disk must not overtake it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    event: HostEvent
    parts: _Parts
    tensor: torch.Tensor
    after: tuple[Event, ...]


class StagedDisk:
    """Satisfies `memo.swap.backends.protocol.Disk` for device tensors over a `disk` that takes host tensors.

    `blocks` staging blocks of `block_bytes` in each direction, from `empty_host`.
    """

    def __init__(
        self,
        disk: Disk,
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
        extents: list[Extent] = []
        for start in range(0, nbytes, self._block_bytes):
            extent = self._disk.reserve(min(self._block_bytes, nbytes - start))
            if extent is None:
                for taken in extents:
                    self._disk.release(taken)
                return None
            extents.append(extent)
        return _Parts(nbytes, tuple(extents))

    def release(self, extent: Extent) -> None:
        assert isinstance(extent, _Parts)
        for part in extent.extents:
            self._disk.release(part)

    def write(self, extent: Extent, source: torch.Tensor, *, after: Sequence[Event] = ()) -> HostEvent:
        assert isinstance(extent, _Parts)
        extent.written = self._lanes[0].put(_Job(HostEvent(), extent, source, tuple(after)))
        return extent.written

    def read(self, extent: Extent, target: torch.Tensor, *, after: Sequence[Event] = ()) -> HostEvent:
        assert isinstance(extent, _Parts)
        return self._lanes[1].put(_Job(HostEvent(), extent, target, tuple(after)))

    def close(self) -> None:
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
                    writes.popleft().synchronize()  # the block's last write, before it is overwritten
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
        pieces = list(self._pieces(job))
        reads: collections.deque[Event] = collections.deque()
        copies: collections.deque[Event] = collections.deque()
        try:
            for number, (part, piece) in enumerate(pieces):
                if len(reads) + len(copies) == len(ring):
                    self._pass_on(pieces, number, reads, copies, stream, ring)
                block = ring[number % len(ring)][: piece.numel()]
                reads.append(self._disk.read(part, block))
            while reads:
                self._copy_oldest(pieces, len(pieces) - len(reads), reads, copies, stream, ring)
        finally:
            try:
                _settle(reads)
            finally:
                _settle(copies)  # also where reads failed: a copy that still runs would write into a freed buffer

    def _pass_on(
        self,
        pieces: Sequence[tuple[Extent, torch.Tensor]],
        number: int,
        reads: collections.deque[Event],
        copies: collections.deque[Event],
        stream: CopyStream,
        ring: Sequence[torch.Tensor],
    ) -> None:
        """Frees the oldest block of a full ring: its read must end and its copy to the device too."""
        if not copies:
            self._copy_oldest(pieces, number - len(reads), reads, copies, stream, ring)
        copies.popleft().synchronize()

    def _copy_oldest(
        self,
        pieces: Sequence[tuple[Extent, torch.Tensor]],
        number: int,
        reads: collections.deque[Event],
        copies: collections.deque[Event],
        stream: CopyStream,
        ring: Sequence[torch.Tensor],
    ) -> None:
        reads.popleft().synchronize()
        piece = pieces[number][1]
        copies.append(stream.copy(piece, ring[number % len(ring)][: piece.numel()]))

    def _pieces(self, job: _Job) -> list[tuple[Extent, torch.Tensor]]:
        size = self._block_bytes
        return [(part, job.tensor[i * size : (i + 1) * size]) for i, part in enumerate(job.parts.extents)]


def _settle(events: collections.deque[Event]) -> None:
    """Waits for all, so that no staging block is in use afterwards; raises the first failure."""
    failure: BaseException | None = None
    while events:
        try:
            events.popleft().synchronize()
        except SwapError as error:
            failure = failure or error
    if failure is not None:
        raise failure


class _Lane:
    """Runs jobs in order on one thread, started with the first."""

    def __init__(self, name: str, run: Callable[[_Job], None]) -> None:
        self._name = name
        self._run = run
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: _Job) -> HostEvent:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
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
                del job  # the tensor's life is not this thread's
                event.finish(begin, failure)

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
