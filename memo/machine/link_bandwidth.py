"""Measures the links that bytes move over: disk write and read, host copy, GPU to host and back; alone and together.

What is measured is what the engine would get: the disk through a DiskStore, the GPU's link through page-locked memory.
Every measurement is bounded in time, not in bytes, so that a slow disk takes no longer to know than a fast one.
"""

from __future__ import annotations

import collections
import contextlib
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memo.errors import ScratchFull
from memo.events import Lane
from memo.swap import aligned_empty, available_host_bytes
from memo.swap.backends import CpuBackend
from memo.swap.disk import DiskExtent, DiskStore

if TYPE_CHECKING:
    from memo.swap.backends import CopyStream, Timed

__all__ = ["DiskRates", "HostFacts", "LinkRates", "host_facts", "measure_disk", "measure_lanes", "measure_link"]

_TENSOR_BYTES = 16 << 20
_SCRATCH_BYTES = 512 << 20
_OUTSTANDING = 4  # operations in flight for each direction: enough to keep every I/O thread busy


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """One directory, or several striped."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    write_together_bytes_per_s: float
    """While reading at the same time; the two share one device."""
    read_together_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """One GPU's link to host memory."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_together_bytes_per_s: float
    h2d_together_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Host memory as a budget sees it."""

    memory_available_bytes: int
    """The smaller of what the kernel and the control group leave."""
    memlock_limit_bytes: int | None
    """How much may be page-locked; None is without limit."""
    copy_bytes_per_s: float
    """Memory to memory, one copy at a time."""


def measure_disk(directories: Sequence[Path], *, seconds: float) -> DiskRates:
    """Takes six times `seconds`: write, read, both for twice as long, and before that two passes of plain writing.

    The first write into a reserved block costs the file system more than later ones, and a step overwrites.

    Raises:
        ScratchUnusable, ScratchFull: as DiskStore. Nothing is left on the disk.
    """
    writer = DiskStore(directories, _SCRATCH_BYTES // 2)
    try:
        reader = DiskStore(directories, _SCRATCH_BYTES // 2)
        try:
            write, read = _lane(writer, "write", seconds), _lane(reader, "read", seconds)
            alone = _sustain([write], seconds) + _sustain([read], seconds)
            together = _sustain([write, read], 2 * seconds)
        finally:
            reader.close()
    finally:
        writer.close()
    return DiskRates(
        write_bytes_per_s=alone[0],
        read_bytes_per_s=alone[1],
        write_together_bytes_per_s=together[0],
        read_together_bytes_per_s=together[1],
    )


def measure_lanes(
    device: torch.device, *, host: bool, directories: Sequence[Path], seconds: float
) -> dict[Lane, float]:
    """Bytes per second of each copy lane alone: what a trace compares its copies with. Takes about six times `seconds`.

    `host` says whether there is a host tier, `directories` where the disk tier is. A lane that is off, or for which there
    is no room to measure, is left out. Leaves nothing behind.
    """
    rates: dict[Lane, float] = {}
    if device.type == "cuda":
        link = measure_link(device, seconds=seconds)
        rates |= {Lane.D2H: link.d2h_bytes_per_s, Lane.H2D: link.h2d_bytes_per_s}
    elif host:
        rates |= dict.fromkeys((Lane.D2H, Lane.H2D), _worker_copy_rate(seconds))
    if directories:
        with contextlib.suppress(ScratchFull):
            rates[Lane.DISK_WRITE] = _disk_rate(directories, "write", seconds)
            rates[Lane.DISK_READ] = _disk_rate(directories, "read", seconds)
    return rates


def _disk_rate(directories: Sequence[Path], direction: str, seconds: float) -> float:
    store = DiskStore(directories, _OUTSTANDING * _TENSOR_BYTES)
    try:
        return _sustain([_lane(store, direction, seconds)], seconds)[0]
    finally:
        store.close()


def _worker_copy_rate(seconds: float) -> float:
    """Memory to memory on a worker thread of the CPU backend."""
    backend = CpuBackend()
    try:
        target, source = aligned_empty(_TENSOR_BYTES).fill_(1), aligned_empty(_TENSOR_BYTES).fill_(2)
        return _copy_rates([(backend.d2h, target, source)], seconds)[0]
    finally:
        backend.close()


def _lane(store: DiskStore, direction: str, seconds: float) -> Callable[[int], Timed]:
    """Issues the i-th operation of one direction, over and over the extents that could be written in `seconds`."""
    buffers = [aligned_empty(_TENSOR_BYTES).random_(0, 256) for _ in range(_OUTSTANDING)]
    extents: list[DiskExtent] = []
    deadline = time.perf_counter() + seconds
    while not extents or time.perf_counter() < deadline:
        group = [extent for _ in buffers if (extent := store.reserve(_TENSOR_BYTES)) is not None]
        if not group:
            break
        for operation in [store.write(*pair) for pair in zip(group, buffers, strict=False)]:
            operation.synchronize()
        extents += group
    issue = store.write if direction == "write" else store.read
    return lambda number: issue(extents[number % len(extents)], buffers[number % _OUTSTANDING])


def _sustain(lanes: Sequence[Callable[[int], Timed]], seconds: float) -> list[float]:
    """Bytes per second of each lane while all of them run for `seconds`."""
    deadline = time.perf_counter() + seconds

    def run(start: Callable[[int], Timed]) -> float:
        begin, issued, done = time.perf_counter(), 0, 0
        flying: collections.deque[Timed] = collections.deque()
        while time.perf_counter() < deadline or flying:
            while len(flying) < _OUTSTANDING and time.perf_counter() < deadline:
                flying.append(start(issued))
                issued += 1
            if flying:
                flying.popleft().synchronize()
                done += 1
        return done * _TENSOR_BYTES / (time.perf_counter() - begin)

    with ThreadPoolExecutor(len(lanes)) as threads:
        return list(threads.map(run, lanes))


def host_facts(*, seconds: float) -> HostFacts:
    """Reads the limits and measures one copy for `seconds`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    source, target = aligned_empty(4 * _TENSOR_BYTES).fill_(1), aligned_empty(4 * _TENSOR_BYTES).fill_(2)
    begin, copies = time.perf_counter(), 0
    while not copies or time.perf_counter() - begin < seconds:
        target.copy_(source)
        copies += 1
    rate = copies * source.numel() / (time.perf_counter() - begin)
    return HostFacts(
        memory_available_bytes=available_host_bytes(),
        memlock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        copy_bytes_per_s=rate,
    )


def measure_link(device: torch.device, *, seconds: float) -> LinkRates:
    """Page-locked copies on the engine's own kind of streams, each direction alone and both at once."""
    from memo.swap import page_locked
    from memo.swap.backends import copy_stream

    with torch.cuda.device(device):
        pairs = [
            (page_locked(4 * _TENSOR_BYTES), torch.empty(4 * _TENSOR_BYTES, dtype=torch.uint8, device=device))
            for _ in range(2)
        ]
        torch.cuda.synchronize(device)
        out = (copy_stream(device), pairs[0][0], pairs[0][1])
        back = (copy_stream(device), pairs[1][1], pairs[1][0])
        alone = _copy_rates([out], seconds) + _copy_rates([back], seconds)
        together = _copy_rates([out, back], seconds)
        torch.cuda.synchronize(device)
    return LinkRates(
        d2h_bytes_per_s=alone[0],
        h2d_bytes_per_s=alone[1],
        d2h_together_bytes_per_s=together[0],
        h2d_together_bytes_per_s=together[1],
    )


def _copy_rates(lanes: Sequence[tuple[CopyStream, torch.Tensor, torch.Tensor]], seconds: float) -> list[float]:
    """Bytes per second of each (stream, target, source); all of them are kept busy until the time is over."""
    begin, done = time.perf_counter(), [0] * len(lanes)
    flying: list[collections.deque[Timed]] = [collections.deque() for _ in lanes]
    while time.perf_counter() - begin < seconds:
        for (stream, target, source), queue in zip(lanes, flying, strict=True):
            while len(queue) < _OUTSTANDING:
                queue.append(stream.copy(target, source))
        for index, queue in enumerate(flying):
            while queue and queue[0].query():
                queue.popleft()
                done[index] += 1
    elapsed = time.perf_counter() - begin
    for queue in flying:
        for event in queue:
            event.synchronize()
    return [count * lane[2].numel() / elapsed for count, lane in zip(done, lanes, strict=True)]
