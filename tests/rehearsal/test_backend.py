"""Copies, pinning and disk of a simulated GPU: begin and end of each operation, by hand."""

from __future__ import annotations

import pytest
import torch

from memo.machine import LinkRates
from memo.rehearsal.backend import SimulatedBackend, SimulatedDisk
from memo.rehearsal.clock import Clock

# 1 byte a nanosecond alone, half of that while the other direction copies, too.
LINK = LinkRates(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9, d2h_together_bytes_per_s=5e8, h2d_together_bytes_per_s=5e8)


@pytest.fixture
def clock() -> Clock:
    return Clock(10)


@pytest.fixture
def backend(clock: Clock) -> SimulatedBackend:
    return SimulatedBackend(clock, LINK, lock_s_per_byte=2e-9)


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_copies_of_one_direction_follow_one_another(backend: SimulatedBackend, clock: Clock) -> None:
    start = clock.host_ns
    first = backend.d2h.copy(block(100), block(100))
    second = backend.d2h.copy(block(50), block(50))
    assert first.interval_ns() == (start, start + 100)
    assert second.interval_ns() == (start + 100, start + 150)
    assert clock.host_ns == start  # no copy blocks the host


def test_a_copy_begins_after_what_its_stream_waits_for(backend: SimulatedBackend, clock: Clock) -> None:
    clock.run(1000)
    backend.d2h.wait(backend.compute_event())
    assert backend.d2h.copy(block(100), block(100)).begin_ns == clock.compute_ns


def test_both_directions_at_once_have_the_rates_of_both(backend: SimulatedBackend, clock: Clock) -> None:
    start = clock.host_ns
    assert backend.d2h.copy(block(100), block(100)).end_ns == start + 100
    assert backend.h2d.copy(block(100), block(100)).end_ns == start + 200
    clock.wait(start + 200)
    assert backend.h2d.copy(block(100), block(100)).end_ns == start + 300


def test_compute_waits_for_a_copy_and_the_host_does_not(backend: SimulatedBackend, clock: Clock) -> None:
    start = clock.host_ns
    event = backend.h2d.copy(block(100), block(100))
    assert not event.query()
    assert not backend.would_block(event)
    backend.compute_wait(event)
    assert (clock.host_ns, clock.compute_ns) == (start, start + 100)
    event.synchronize()
    assert event.query()


def test_finish_waits_for_kernels_and_copies(backend: SimulatedBackend, clock: Clock) -> None:
    start = clock.host_ns
    clock.run(20)
    backend.d2h.copy(block(100), block(100))
    backend.finish()
    assert backend.now_ns() == start + 10 + 100
    clock.run(20)
    backend.finish()
    assert backend.now_ns() == start + 10 + 100 + 10 + 20


def test_pages_are_locked_piece_by_piece(backend: SimulatedBackend, clock: Clock) -> None:
    start = clock.host_ns
    slab = backend.host_slab(1000)
    slab.grow(100)
    slab.grow(300)
    assert clock.host_ns == start
    slab.wait(50)  # half of the first piece
    assert clock.host_ns == start + 100
    slab.wait(100)
    assert clock.host_ns == start + 200
    slab.wait(300)
    assert clock.host_ns == start + 600
    slab.shrink(100)
    assert slab.nbytes == 100
    slab.grow(200)  # these pages are locked again
    slab.wait(200)
    assert clock.host_ns == start + 800


def test_a_slab_calls_back_once_when_it_is_freed(backend: SimulatedBackend) -> None:
    slab, calls = backend.host_slab(10), []
    slab.when_freed(lambda: calls.append("freed"))
    slab.close()
    slab.close()
    assert calls == ["freed"]


def test_disk_operations_take_their_rates_and_block_the_host(backend: SimulatedBackend, clock: Clock) -> None:
    start = clock.host_ns
    disk = SimulatedDisk(clock, 100, write_bytes_per_s=1e9, read_bytes_per_s=2e9)
    extent = disk.reserve(100)
    assert extent is not None
    assert disk.reserve(1) is None
    write = disk.write(extent, block(100))
    read = disk.read(extent, block(100), after=[write])
    assert write.interval_ns() == (start, start + 100)
    assert read.interval_ns() == (start + 100, start + 150)
    assert backend.would_block(read)
    assert not backend.is_past(read)
    backend.compute_wait(read)  # a stream of the device cannot wait for a thread of the host
    assert clock.host_ns == start + 150
    assert backend.is_past(read)
    disk.release(extent)
    assert disk.reserve(100) is not None


def test_a_copy_after_a_disk_read_blocks_the_host(backend: SimulatedBackend, clock: Clock) -> None:
    start = clock.host_ns
    disk = SimulatedDisk(clock, None, write_bytes_per_s=1e9, read_bytes_per_s=1e9)
    extent = disk.reserve(100)
    assert extent is not None
    backend.h2d.wait(disk.read(extent, block(100)))
    assert clock.host_ns == start + 100
    assert backend.h2d.copy(block(10), block(10)).begin_ns == start + 100
