"""Device bytes through staging blocks to disk and back, with worker threads standing in for copy engines."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from faulty_file import Faults, ManualEvent

from memo.errors import StoreReadError, StoreWriteError
from memo.swap import aligned_empty
from memo.swap.backends import CpuBackend
from memo.swap.backends.cpu import HostEvent, ThreadStream
from memo.swap.disk import DiskStore, StagedDisk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 1 << 14


class Staging:
    """A StagedDisk over real worker threads, and what its staging blocks may not exceed."""

    def __init__(self, directory: Path, faults: Faults, capacity: int = 1 << 22) -> None:
        self.backend, self.others = CpuBackend(), CpuBackend()
        self.taken: list[int] = []
        store = DiskStore([directory], capacity, block_bytes=BLOCK, open_file=faults.open)
        self.disk = StagedDisk(store, self.backend.d2h, self.others.h2d, self._host, block_bytes=BLOCK, blocks=3)

    def _host(self, nbytes: int) -> torch.Tensor:
        self.taken.append(nbytes)
        return aligned_empty(nbytes)

    def close(self) -> None:
        self.disk.close()
        self.backend.close()
        self.others.close()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def staging(tmp_path: Path, faults: Faults) -> Iterator[Staging]:
    made = Staging(tmp_path, faults)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nbytes", [1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 10 * BLOCK + 77])
def test_bytes_come_back_exact_whatever_their_length(staging: Staging, nbytes: int) -> None:
    source, target = random_bytes(nbytes, nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    extent = staging.disk.reserve(nbytes)
    assert extent is not None
    staging.disk.write(extent, source).synchronize()
    staging.disk.read(extent, target).synchronize()
    assert torch.equal(source, target)
    staging.disk.release(extent)
    assert staging.taken == [2 * 3 * BLOCK], "staging does not grow with the storage"


def test_many_storages_at_once_do_not_mix(staging: Staging) -> None:
    sources = [random_bytes(5 * BLOCK + 13 * n, n) for n in range(12)]
    extents = [staging.disk.reserve(len(source)) for source in sources]
    writes = [staging.disk.write(e, s) for e, s in zip(extents, sources, strict=True) if e is not None]
    targets = [torch.zeros_like(source) for source in sources]
    reads = [
        staging.disk.read(e, t, after=(w,)) for e, t, w in zip(extents, targets, writes, strict=True) if e is not None
    ]
    for read in reads:
        read.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))


def test_a_write_waits_for_its_source(staging: Staging) -> None:
    ready = ManualEvent()
    source, target = torch.zeros(BLOCK, dtype=torch.uint8), torch.zeros(BLOCK, dtype=torch.uint8)
    extent = staging.disk.reserve(BLOCK)
    assert extent is not None
    write = staging.disk.write(extent, source, after=(ready,))
    assert not write.query()
    source.fill_(9)
    ready.fire()
    write.synchronize()
    staging.disk.read(extent, target).synchronize()
    assert bool((target == 9).all())


def test_copies_out_and_writes_overlap(staging: Staging, faults: Faults) -> None:
    """While a slow disk writes one part the next is already copied: two copies are done before the first write is."""
    faults.fail("write", 1, delay=0.2, sticky=True)
    copies: list[int] = []
    stream, original = staging.backend.d2h, staging.backend.d2h.copy
    lock = threading.Lock()

    def count(target: torch.Tensor, source: torch.Tensor) -> object:
        with lock:
            copies.append(faults.calls["write"])
        return original(target, source)

    stream.copy = count  # type: ignore[method-assign, assignment]
    extent = staging.disk.reserve(6 * BLOCK)
    assert extent is not None
    staging.disk.write(extent, random_bytes(6 * BLOCK, 0)).synchronize()
    assert len(copies) == 6
    assert copies[2] <= 2, "the third copy was issued before the third write began"


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("operation", ["write", "read"])
def test_each_failed_part_fails_the_operation_and_the_next_one_works(
    staging: Staging, faults: Faults, operation: str, nth: int
) -> None:
    faults.fail(operation, nth, errno=errno.EIO, sticky=True)  # type: ignore[arg-type]
    source, target = random_bytes(5 * BLOCK, nth), torch.zeros(5 * BLOCK, dtype=torch.uint8)
    extent = staging.disk.reserve(5 * BLOCK)
    assert extent is not None
    write = staging.disk.write(extent, source)
    if operation == "write":
        with pytest.raises(StoreWriteError, match="EIO"):
            write.synchronize()
    else:
        write.synchronize()
        with pytest.raises(StoreReadError, match="EIO"):
            staging.disk.read(extent, target).synchronize()
    faults._faults.clear()
    staging.disk.write(extent, source).synchronize()
    staging.disk.read(extent, target).synchronize()
    assert torch.equal(source, target)


class SlowBack(ThreadStream):
    """Copies to the device that come late."""

    def __init__(self) -> None:
        super().__init__("late")
        self.events: list[HostEvent] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> HostEvent:
        self.events.append(super().copy(target, source))
        return self.events[-1]

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(0.1)
        super()._move(target, source)


def test_a_read_that_failed_touches_its_target_no_more(tmp_path: Path, faults: Faults) -> None:
    made, back = Staging(tmp_path, faults), SlowBack()
    disk = StagedDisk(made.disk._disk, made.backend.d2h, back, aligned_empty, block_bytes=BLOCK, blocks=3)
    extent = disk.reserve(3 * BLOCK)
    assert extent is not None
    disk.write(extent, random_bytes(3 * BLOCK, 1)).synchronize()
    faults.fail("read", 2, errno=errno.EIO, sticky=True)
    with pytest.raises(StoreReadError, match="EIO"):
        disk.read(extent, torch.zeros(3 * BLOCK, dtype=torch.uint8)).synchronize()
    assert back.events
    assert all(event.query() for event in back.events)
    disk.close()
    back.close()
    made.close()


def test_a_reservation_that_does_not_fit_takes_nothing(tmp_path: Path, faults: Faults) -> None:
    made = Staging(tmp_path, faults, capacity=4 * BLOCK)
    assert made.disk.reserve(6 * BLOCK) is None
    assert made.disk.reserve(4 * BLOCK) is not None
    made.close()


def test_a_write_not_begun_can_be_cancelled(staging: Staging) -> None:
    blocked = ManualEvent()
    first, second = staging.disk.reserve(BLOCK), staging.disk.reserve(BLOCK)
    assert first is not None
    assert second is not None
    running = staging.disk.write(first, random_bytes(BLOCK, 1), after=(blocked,))
    waiting = staging.disk.write(second, random_bytes(BLOCK, 2))
    assert waiting.cancel()
    blocked.fire()
    running.synchronize()
    assert waiting.query()
    assert not running.cancel()
