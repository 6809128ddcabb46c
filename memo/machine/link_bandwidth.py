"""Bandwidth measurements: disk write and read, host copy, D2H and H2D; each direction alone and both at once.

They use the engine's own paths: the disk through a DiskStore, the GPU's link through pinned memory. Every
measurement is bounded in time, not in bytes, so a slow disk takes no longer to measure than a fast one.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memo.errors import ScratchFull
from memo.events import Lane
from memo.machine.process_memory import HostUser, largest_host_users
from memo.swap import aligned_empty, available_host_bytes
from memo.swap.disk import DiskExtent, DiskStore

if TYPE_CHECKING:
    from memo.swap.backends import CopyStream, Timed

_TENSOR_BYTES = 16 << 20
_SCRATCH_BYTES = 512 << 20
_OUTSTANDING = 4  # operations in flight in each direction: enough to keep every I/O thread busy


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """Rates of one scratch directory, or of several striped."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    write_together_bytes_per_s: float
    """While reading at the same time."""
    read_together_bytes_per_s: float
    """While writing at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Rates of one GPU's link to pinned host memory; `together` with the other direction."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_together_bytes_per_s: float
    h2d_together_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Host memory: free bytes and copy rate."""

    memory_available_bytes: int
    """Smaller of the kernel's estimate and the control group's limit."""
    copy_bytes_per_s: float
    """One copy at a time, memory to memory."""
    users: list[HostUser] = field(default_factory=list)
    """Processes that hold most of the rest, largest first."""


def measure_disk(directories: Sequence[Path], *, seconds: float) -> DiskRates:
    """Measures the disk tier over `directories`, striped.

    Takes six times `seconds`: two passes that write the extents for the first time, then write, read, and both at once
    for twice as long. The first write to a reserved block costs the file system more than later ones; a training step
    overwrites.

    Raises:
        ScratchUnusable, ScratchFull: As DiskStore. Nothing is left on the disk.
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


def measure_lanes(device: torch.device, *, directories: Sequence[Path], seconds: float) -> dict[Lane, float]:
    """Measures each copy lane alone, as the reference for the rates of a trace. Takes about six times `seconds`.

    Args:
        device: Device of the engine.
        directories: Scratch directories of the disk tier; empty without one.
        seconds: Length of one measurement.

    Returns:
        Bytes per second by lane. Left out: unused lanes, a disk too full to measure, and host memory on a CPU, which has no
        link.
    """
    rates: dict[Lane, float] = {}
    if device.type == "cuda":
        link = measure_link(device, seconds=seconds)
        rates |= {Lane.D2H: link.d2h_bytes_per_s, Lane.H2D: link.h2d_bytes_per_s}
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


def _lane(store: DiskStore, direction: str, seconds: float) -> Callable[[int], Timed]:
    """Returns a function that issues the i-th operation of one direction, cyclic over extents written in `seconds`."""
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
    """Bytes per second of each lane while all run for `seconds`, and until each has done something."""
    deadline = time.perf_counter() + seconds

    def run(start: Callable[[int], Timed]) -> float:
        begin, issued, done = time.perf_counter(), 0, 0
        flying: collections.deque[Timed] = collections.deque()
        while time.perf_counter() < deadline or flying or not issued:
            while len(flying) < _OUTSTANDING and (time.perf_counter() < deadline or not issued):
                flying.append(start(issued))
                issued += 1
            if flying:
                flying.popleft().synchronize()
                done += 1
        return done * _TENSOR_BYTES / (time.perf_counter() - begin)

    with ThreadPoolExecutor(len(lanes)) as threads:
        return list(threads.map(run, lanes))


def host_facts(*, seconds: float) -> HostFacts:
    """Reads how much host memory is free and measures its copy rate for `seconds`."""
    source, target = aligned_empty(4 * _TENSOR_BYTES).fill_(1), aligned_empty(4 * _TENSOR_BYTES).fill_(2)
    begin, copies = time.perf_counter(), 0
    while not copies or time.perf_counter() - begin < seconds:
        target.copy_(source)
        copies += 1
    rate = copies * source.numel() / (time.perf_counter() - begin)
    return HostFacts(
        memory_available_bytes=available_host_bytes(),
        copy_bytes_per_s=rate,
        users=largest_host_users(),
    )


def measure_link(device: torch.device, *, seconds: float, room_bytes: int = 8 * _TENSOR_BYTES) -> LinkRates:
    """Measures pinned copies of a GPU on copy streams like the engine's. Takes three times `seconds`.

    Args:
        device: the GPU.
        seconds: length of one measurement.
        room_bytes: device memory that the copies may take; 2 MiB at least.
    """
    from memo.swap import empty_pinned
    from memo.swap.backends import copy_stream

    nbytes = min(4 * _TENSOR_BYTES, max(1 << 20, room_bytes // 2))
    with torch.cuda.device(device):
        pairs = [(empty_pinned(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=device)) for _ in range(2)]
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
    """Bytes per second of each (stream, target, source); all are kept busy for `seconds`, and until each has copied once."""
    begin, done = time.perf_counter(), [0] * len(lanes)
    flying: list[collections.deque[Timed]] = [collections.deque() for _ in lanes]
    while time.perf_counter() - begin < seconds or 0 in done:
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
