"""The disk store: every byte comes back, operations keep their order, space is exact, nothing outlives close."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from faulty_file import Faults, ManualEvent
from hypothesis import HealthCheck, given, settings, strategies as st

from memo.errors import StoreReadError, SwapError
from memo.swap import aligned_empty
from memo.swap.disk import DiskStore

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore([tmp_path], 4 << 20, block_bytes=64 * KIB)
    yield made
    made.close()


def random_bytes(nbytes: int, *, shift: int = 0, seed: int = 0) -> torch.Tensor:
    """`nbytes` at `shift` bytes from a page boundary."""
    tensor = aligned_empty(nbytes + shift)[shift:] if shift else aligned_empty(nbytes)
    return tensor.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def disk_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("memo-disk")}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 300 * KIB), min_size=1, max_size=6),
    shifts=st.lists(st.sampled_from([0, 1, 64, 512, 4096]), min_size=2, max_size=2),
    block_pages=st.integers(1, 20),
    directories=st.integers(1, 3),
    verify=st.booleans(),
    growing=st.booleans(),
)
def test_bytes_come_back_whatever_their_size_alignment_and_striping(
    tmp_path: Path,
    sizes: list[int],
    shifts: list[int],
    block_pages: int,
    directories: int,
    verify: bool,
    growing: bool,
) -> None:
    paths = [tmp_path / str(index) for index in range(directories)]
    for path in paths:
        path.mkdir(exist_ok=True)
    store = DiskStore(paths, None if growing else 4 << 20, block_bytes=4096 * block_pages, verify=verify)
    sources = [random_bytes(size, shift=shifts[0], seed=index) for index, size in enumerate(sizes)]
    targets = [random_bytes(size, shift=shifts[1], seed=99) for size in sizes]
    extents = [store.reserve(size) for size in sizes]
    assert all(extent is not None for extent in extents)
    writes = [store.write(extent, source) for extent, source in zip(extents, sources, strict=True)]
    reads = [
        store.read(extent, target, after=[write])
        for extent, target, write in zip(extents, targets, writes, strict=True)
    ]
    for read in reads:
        read.synchronize()
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
    store.close()


def test_bytes_beside_a_target_are_left_alone(store: DiskStore) -> None:
    extent = store.reserve(5000)
    store.write(extent, random_bytes(5000)).synchronize()
    slab = torch.full((16384,), 7, dtype=torch.uint8)
    aligned = aligned_empty(16384).fill_(7)
    for around in (slab, aligned):
        store.read(extent, around[4096:9096]).synchronize()
        assert torch.equal(around[4096:9096], random_bytes(5000))
        assert bool((around[:4096] == 7).all())
        assert bool((around[9096:] == 7).all())


def test_blocks_are_spread_over_the_directories_in_turn(tmp_path: Path) -> None:
    faults = Faults()
    store = DiskStore([tmp_path, tmp_path], 512 * KIB, block_bytes=64 * KIB, open_file=faults.open)
    source = random_bytes(256 * KIB)
    extent = store.reserve(256 * KIB)
    store.write(extent, source).synchronize()
    for index, file in enumerate(faults.files):
        block = aligned_empty(64 * KIB)
        for row in range(2):
            assert file.pread(memoryview(block.numpy()), row * 64 * KIB) == 64 * KIB
            begin = (2 * row + index) * 64 * KIB
            assert torch.equal(block, source[begin : begin + 64 * KIB])
    store.close()


def test_a_file_gets_exactly_its_share_of_the_capacity(tmp_path: Path) -> None:
    faults = Faults()
    capacity = 5 * 64 * KIB + 4096
    store = DiskStore([tmp_path] * 3, capacity + 100, block_bytes=64 * KIB, open_file=faults.open)
    sizes = [os.fstat(file.fd).st_size for file in faults.files]
    assert sizes == [2 * 64 * KIB, 2 * 64 * KIB, 64 * KIB + 4096]
    assert store.stats.capacity_bytes == sum(sizes) == capacity
    assert all(os.fstat(file.fd).st_blocks * 512 >= size for file, size in zip(faults.files, sizes, strict=True))
    store.close()


@pytest.mark.promise("R8")
def test_the_budget_is_hard_and_released_space_is_reused(store: DiskStore) -> None:
    extents = [store.reserve(1 << 20) for _ in range(4)]
    assert all(extents)
    assert store.reserve(1) is None
    assert store.stats.used_bytes == store.stats.peak_bytes == 4 << 20
    store.release(extents[1])
    again = store.reserve(1 << 20)
    assert again is not None
    assert again.offset == 1 << 20
    assert again.nbytes == 1 << 20


def test_growth_stops_where_the_spare_bytes_begin(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    store = DiskStore([tmp_path], None, spare_bytes=free)
    assert store.stats.capacity_bytes == 0
    assert store.reserve(4096) is None
    store.close()


def test_an_operation_starts_only_after_its_events(store: DiskStore) -> None:
    source, extent, copied = random_bytes(4096), store.reserve(4096), ManualEvent()
    source.fill_(1)
    write = store.write(extent, source, after=[copied])
    time.sleep(0.02)
    assert not write.query()
    source.fill_(2)
    copied.fire()
    target = aligned_empty(4096)
    store.read(extent, target, after=[write]).synchronize()
    assert bool((target == 2).all())


def test_waiting_writes_do_not_hold_up_a_read_that_is_ready(store: DiskStore) -> None:
    extent, never = store.reserve(4096), ManualEvent()
    store.write(extent, random_bytes(4096)).synchronize()
    blocked = [store.write(store.reserve(4096), random_bytes(4096), after=[never]) for _ in range(20)]
    store.read(extent, aligned_empty(4096)).synchronize()
    assert not any(write.query() for write in blocked)
    never.fire()
    for write in blocked:
        write.synchronize()


def test_reads_that_wait_for_queued_writes_do_not_deadlock(tmp_path: Path) -> None:
    faults = Faults().fail("write", 1, delay=0.002, sticky=True)
    store = DiskStore([tmp_path], 4 << 20, threads=1, open_file=faults.open)
    extents = [store.reserve(4096) for _ in range(30)]
    writes = [store.write(extent, random_bytes(4096, seed=i)) for i, extent in enumerate(extents)]
    targets = [aligned_empty(4096) for _ in extents]
    last_first = reversed(list(zip(extents, targets, writes, strict=True)))
    reads = [store.read(extent, target, after=[write]) for extent, target, write in last_first]
    for read in reads:
        read.synchronize()
    assert all(torch.equal(target, random_bytes(4096, seed=i)) for i, target in enumerate(targets))
    store.close()


def test_reads_go_before_writes_that_were_queued_earlier(tmp_path: Path) -> None:
    store = DiskStore([tmp_path], 4 << 20, threads=1, open_file=Faults().fail("write", 2, delay=0.05).open)
    extent = store.reserve(4096)
    store.write(extent, random_bytes(4096)).synchronize()
    running = store.write(store.reserve(4096), random_bytes(4096))  # the slow one
    queued = [store.write(store.reserve(4096), random_bytes(4096)) for _ in range(5)]
    read = store.read(extent, aligned_empty(4096))
    for operation in (running, read, *queued):
        operation.synchronize()
    read_end = read.interval_ns()
    assert read_end is not None
    assert all(read_end[1] <= write.interval_ns()[0] for write in queued)
    store.close()


def test_a_cancelled_operation_never_runs(store: DiskStore) -> None:
    extent, copied = store.reserve(4096), ManualEvent()
    store.write(extent, torch.zeros(4096, dtype=torch.uint8)).synchronize()
    write = store.write(extent, torch.ones(4096, dtype=torch.uint8), after=[copied])
    assert write.cancel()
    assert write.query()
    write.synchronize()
    assert write.interval_ns() is None
    copied.fire()
    target = aligned_empty(4096)
    store.read(extent, target).synchronize()
    assert bool((target == 0).all())
    store.release(extent)


def test_what_has_begun_or_ended_cannot_be_cancelled(tmp_path: Path) -> None:
    faults = Faults().fail("write", 1, delay=0.05)
    store = DiskStore([tmp_path], 1 << 20, open_file=faults.open)
    write = store.write(store.reserve(4096), random_bytes(4096))
    while not faults.calls["write"]:
        time.sleep(0.001)
    assert not write.cancel()
    write.synchronize()
    assert not write.cancel()
    store.close()


@pytest.mark.parametrize("outcome", ["done", "failed", "cancelled"])
def test_the_source_lives_until_the_operation_is_done_and_no_longer(tmp_path: Path, outcome: str) -> None:
    faults = Faults()
    if outcome == "failed":
        faults.fail("write", 1, errno=5)
    store = DiskStore([tmp_path], 1 << 20, open_file=faults.open)
    source, copied = random_bytes(5001, shift=64), ManualEvent()
    alive = weakref.ref(source)
    write = store.write(store.reserve(5001), source, after=[copied])
    del source
    assert alive() is not None
    if outcome == "cancelled":
        assert write.cancel()
    copied.fire()
    if outcome == "failed":
        with pytest.raises(SwapError):
            write.synchronize()
    write.query() or write.synchronize()
    deadline = time.monotonic() + 5  # a thread may still be on its way from the event back to its queue
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None
    store.close()


def test_an_interval_lies_between_issue_and_completion(store: DiskStore) -> None:
    begin = time.monotonic_ns()
    write = store.write(store.reserve(200 * KIB), random_bytes(200 * KIB))
    write.synchronize()
    interval = write.interval_ns()
    assert interval is not None
    assert begin <= interval[0] < interval[1] <= time.monotonic_ns()


def test_counters_add_up(store: DiskStore) -> None:
    extent = store.reserve(100 * KIB + 1)
    write = store.write(extent, random_bytes(100 * KIB + 1))
    write.synchronize()
    store.read(extent, aligned_empty(4096)).synchronize()
    stats = store.stats
    assert (stats.bytes_written, stats.bytes_read) == (104 * KIB, 4096)
    assert (stats.write_errors, stats.read_errors, stats.read_retries) == (0, 0, 0)
    interval = write.interval_ns()
    assert interval is not None
    assert 0 < stats.write_busy_s <= (interval[1] - interval[0]) / 1e9
    assert stats.read_busy_s > 0


def test_a_read_beyond_what_was_written_is_refused(store: DiskStore) -> None:
    extent = store.reserve(8192)
    with pytest.raises(ValueError, match="fit the 0"):
        store.read(extent, aligned_empty(1))
    store.write(extent, random_bytes(5000)).synchronize()
    with pytest.raises(ValueError, match="fit the 5000"):
        store.read(extent, aligned_empty(5001))
    with pytest.raises(ValueError, match="fit the 8192"):
        store.write(extent, aligned_empty(8193))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(16), torch.zeros(16, dtype=torch.uint8)[::2], torch.zeros(0, dtype=torch.uint8)],
    ids=["float", "strided", "empty"],
)
def test_only_plain_bytes_are_taken(store: DiskStore, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError):
        store.write(store.reserve(4096), tensor)


def test_an_extent_is_released_once_and_never_under_an_operation(store: DiskStore) -> None:
    extent, copied = store.reserve(4096), ManualEvent()
    write = store.write(extent, random_bytes(4096), after=[copied])
    with pytest.raises(SwapError, match="1 operations"):
        store.release(extent)
    copied.fire()
    write.synchronize()
    store.release(extent)
    with pytest.raises(SwapError, match="twice"):
        store.release(extent)
    with pytest.raises(SwapError, match="released"):
        store.write(extent, random_bytes(4096))


def test_close_completes_what_runs_and_fails_what_has_not_begun(tmp_path: Path) -> None:
    faults = Faults().fail("write", 1, delay=0.05)
    store = DiskStore([tmp_path], 1 << 20, threads=1, open_file=faults.open)
    running = store.write(store.reserve(4096), random_bytes(4096))
    while not faults.calls["write"]:
        time.sleep(0.001)
    never = ManualEvent()
    waiting = store.write(store.reserve(4096), random_bytes(4096), after=[never])
    extent = store.reserve(4096)
    queued = store.write(extent, random_bytes(4096))
    unread = store.read(extent, aligned_empty(4096), after=[queued])
    closer = threading.Thread(target=store.close)
    closer.start()
    running.synchronize()
    for operation in (waiting, queued, unread):
        with pytest.raises(SwapError, match="when the store was closed"):
            operation.synchronize()
    with pytest.raises(StoreReadError):
        unread.synchronize()
    never.fire()
    closer.join()
    assert faults.calls["write"] == 1


def test_an_operation_that_meets_a_closing_store_fails_and_does_not_hang(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = store.reserve(4096)
    monkeypatch.setattr(store, "_check_alive", lambda: store.close())  # another thread, just after the check
    write = store.write(extent, random_bytes(4096))
    with pytest.raises(SwapError, match="when the store was closed"):
        write.synchronize()


def test_close_is_idempotent_and_leaves_no_thread_descriptor_or_name(tmp_path: Path) -> None:
    gc.collect()
    before, threads = descriptors(), disk_threads()
    for _ in range(3):
        store = DiskStore([tmp_path, tmp_path], 1 << 20)
        store.write(store.reserve(4096), random_bytes(4096)).synchronize()
        assert list(tmp_path.iterdir()) == []
        store.close()
        store.close()
    assert descriptors() == before
    assert disk_threads() == threads
    with pytest.raises(SwapError, match="closed"):
        store.reserve(1)


def test_a_store_that_is_dropped_closes_itself(tmp_path: Path) -> None:
    gc.collect()
    before, threads = descriptors(), disk_threads()
    store = DiskStore([tmp_path], 1 << 20)
    store.write(store.reserve(4096), random_bytes(4096)).synchronize()
    del store
    gc.collect()
    assert descriptors() == before
    assert disk_threads() == threads


def test_many_threads_may_use_one_store(store: DiskStore) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(15):
            source = random_bytes(20_000 + seed, seed=100 * seed + turn)
            extent, target = store.reserve(source.numel()), aligned_empty(source.numel())
            store.read(extent, target, after=[store.write(extent, source)]).synchronize()
            store.release(extent)
            if not torch.equal(source, target):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.stats.used_bytes == 0


@pytest.mark.parametrize(
    ("directories", "options"),
    [([], {}), (["."], {"block_bytes": 1000}), (["."], {"block_bytes": 0}), (["."], {"threads": 0})],
)
def test_settings_that_cannot_work_are_refused(directories: list[str], options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        DiskStore(directories, 4096, **options)
