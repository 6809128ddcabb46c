"""The CPU backend with lanes no faster than told: what the engine would do on a machine with slower links.

Copies are real and take at least bytes / rate; what a lane is ahead of its rate by it sleeps, without holding the
interpreter. For measuring plans against predictions where links cannot be chosen. The disk is memory behind two lanes, so
that a real disk's noise is not measured.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import torch

from memo.swap import aligned_empty
from memo.swap.backends import CpuBackend
from memo.swap.backends.cpu import HostEvent, ThreadStream
from memo.swap.memory.free_list import FreeList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memo.swap.backends import Event


class _PacedStream(ThreadStream):
    """Its clock runs on from copy to copy, so that sleeping too long once is made up for."""

    def __init__(self, name: str, bytes_per_s: float) -> None:
        super().__init__(name)
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # when the lane could take the next copy

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        now = time.perf_counter()
        # A worker that woke late may begin in the past, by as much as a late wake-up explains.
        begin = self._free_at if now - self._free_at < 1e-3 else now
        self._free_at = begin + source.numel() / self._bytes_per_s
        super()._move(target, source)
        left = self._free_at - time.perf_counter()
        if left > 0:
            time.sleep(left)


class PacedBackend(CpuBackend):
    """Copies between device and host memory at these rates."""

    def __init__(self, *, d2h_bytes_per_s: float, h2d_bytes_per_s: float) -> None:
        super().__init__()
        self.d2h = _PacedStream("d2h", d2h_bytes_per_s)
        self.h2d = _PacedStream("h2d", h2d_bytes_per_s)


@dataclasses.dataclass(frozen=True, slots=True)
class _Extent:
    offset: int
    nbytes: int


class PacedDisk:
    """Satisfies `memo.swap.backends.protocol.Disk`. One operation a direction at a time."""

    def __init__(self, nbytes: int, *, write_bytes_per_s: float, read_bytes_per_s: float) -> None:
        self._memory = aligned_empty(nbytes)
        self._free = FreeList(nbytes, align=4096)
        self._writing = _PacedStream("disk-write", write_bytes_per_s)
        self._reading = _PacedStream("disk-read", read_bytes_per_s)

    def reserve(self, nbytes: int) -> _Extent | None:
        offset = self._free.allocate(nbytes)
        return None if offset is None else _Extent(offset, nbytes)

    def release(self, extent: _Extent) -> None:
        self._free.free(extent.offset)

    def write(self, extent: _Extent, source: torch.Tensor, *, after: Sequence[Event] = ()) -> HostEvent:
        for event in after:
            self._writing.wait(event)
        return self._writing.copy(self._block(extent, source), source)

    def read(self, extent: _Extent, target: torch.Tensor, *, after: Sequence[Event] = ()) -> HostEvent:
        for event in after:
            self._reading.wait(event)
        return self._reading.copy(target, self._block(extent, target))

    def close(self) -> None:
        self._writing.close()
        self._reading.close()

    def _block(self, extent: _Extent, like: torch.Tensor) -> torch.Tensor:
        return self._memory[extent.offset : extent.offset + like.numel()]
