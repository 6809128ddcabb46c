"""Every fault of a disk: the bytes come back exact, or the named error is raised, and the store works on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from faulty_file import Faults, ManualEvent
from faulty_store import BLOCK, SIZE, make, python, random_bytes, round_trip

from memo.errors import CorruptBlock, ScratchFull, ScratchUnusable, StoreReadError, StoreWriteError, SwapError
from memo.swap import aligned_empty
from memo.swap.disk import DiskStore, io_threads, operation
from memo.swap.disk.io_threads import IoPool

# Row 1: no space


def test_a_budget_beyond_the_file_system_is_refused_with_both_numbers(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ScratchFull, match=r"1024 TiB.*ENOSPC.*free; lower"):
        DiskStore([tmp_path], 1 << 50)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_refused_preallocation_is_scratch_full_and_closes_every_file(tmp_path: Path, number: int) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ScratchFull, match=errno.errorcode[number]):
        DiskStore([tmp_path] * 2, 16 << 20, open_file=Faults().fail("fallocate", 2, errno=number).open)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_cannot_grow_is_a_used_up_budget(tmp_path: Path) -> None:
    faults = Faults().fail("fallocate", 1, errno=errno.ENOSPC).fail("fallocate", 2, errno=errno.ENOSPC)
    store = DiskStore([tmp_path], None, spare_bytes=0, open_file=faults.open)
    assert store.reserve(4096) is None
    assert store.reserve(4096) is not None, "space that others gave back is used"
    store.close()


def test_growth_falls_back_to_the_bytes_asked_for(tmp_path: Path) -> None:
    faults = Faults().fail("fallocate", 1, errno=errno.ENOSPC)
    store = DiskStore([tmp_path], None, block_bytes=BLOCK, spare_bytes=0, open_file=faults.open)
    assert store.reserve(4096) is not None
    assert store.stats.capacity_bytes == BLOCK
    store.close()


def test_a_disk_full_in_a_write_keeps_the_source_and_names_the_error(tmp_path: Path) -> None:
    faults = Faults()
    store = make(tmp_path, faults)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, faults.files[0].fd)
    os.close(full)
    with pytest.raises(StoreWriteError, match=rf"^write of {SIZE} bytes at offset 0 .*ENOSPC"):
        round_trip(store)
    assert store.stats.write_errors > 0
    store.close()


# Row 2: input/output errors. The loop fails every call of a run in turn, until a run meets no fault.


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_every_write_failed_in_turn_is_raised_and_the_store_works_on(tmp_path: Path, number: int, sticky: bool) -> None:
    for nth in range(1, 100):
        faults = Faults().fail("write", nth, errno=number, sticky=sticky)
        store = make(tmp_path, faults)
        if sticky and nth <= 5:
            with pytest.raises(StoreWriteError, match=errno.errorcode[number]):
                round_trip(store)
        elif nth <= 5:
            with pytest.raises(StoreWriteError, match=errno.errorcode[number]):
                round_trip(store)
            round_trip(store, seed=1)
        else:
            round_trip(store)
        assert store.stats.used_bytes == 0
        store.close()
        if not faults.hits:
            break
    assert nth == 6, "five pieces, five writes"


def test_every_read_failed_once_is_retried(tmp_path: Path) -> None:
    for nth in range(1, 100):
        faults = Faults().fail("read", nth, errno=errno.EIO)
        store = make(tmp_path, faults)
        round_trip(store)
        assert store.stats.read_retries == faults.hits
        assert store.stats.read_errors == 0
        store.close()
        if not faults.hits:
            break
    assert nth == 6


def test_a_read_that_keeps_failing_is_raised_after_two_retries(tmp_path: Path) -> None:
    faults = Faults().fail("read", 1, errno=errno.EIO, sticky=True)
    store = DiskStore([tmp_path], 1 << 20, open_file=faults.open)
    with pytest.raises(StoreReadError, match=rf"^read of {SIZE} bytes at offset 0 .*{tmp_path}.*EIO"):
        round_trip(store)
    assert faults.calls["read"] == 3
    assert (store.stats.read_retries, store.stats.read_errors) == (2, 1)
    store.close()


def test_a_failure_is_done_and_is_raised_as_often_as_asked(tmp_path: Path) -> None:
    store = make(tmp_path, Faults().fail("write", 1, errno=errno.EIO))
    write = store.write(store.reserve(4096), random_bytes(4096))
    for _ in range(2):
        with pytest.raises(StoreWriteError) as caught:
            write.synchronize()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EIO
    assert write.query()
    assert not write.cancel()
    store.close()


def test_pieces_after_a_failure_are_not_written(tmp_path: Path) -> None:
    faults = Faults().fail("write", 1, errno=errno.EIO)
    store = make(tmp_path, faults, threads=1)
    with pytest.raises(StoreWriteError):
        round_trip(store)
    assert faults.calls["write"] == 1
    store.close()


@pytest.mark.parametrize("waited_for", [False, True])
def test_a_failed_copy_before_a_write_fails_the_write_with_its_own_error(tmp_path: Path, waited_for: bool) -> None:
    faults = Faults()
    store = make(tmp_path, faults)
    copy = ManualEvent()
    if not waited_for:
        copy.fire(SwapError("the copy of layer 7 failed"))
    write = store.write(store.reserve(SIZE), random_bytes(SIZE), after=[copy])
    copy.fire(SwapError("the copy of layer 7 failed"))
    with pytest.raises(SwapError, match="layer 7"):
        write.synchronize()
    assert faults.calls["write"] == 0
    round_trip(store)
    store.close()


def test_an_error_that_nobody_foresaw_still_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults()
    store = make(tmp_path, faults)
    monkeypatch.setattr(faults.files[0], "pwrite", lambda data, offset: 1 // 0)
    with pytest.raises(StoreWriteError, match="ZeroDivisionError"):
        round_trip(store)
    store.close()


# Row 3: short transfers, interruptions, end of file


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("short", [4096, 10000, 512, 1])
def test_a_short_transfer_is_completed(tmp_path: Path, op: str, short: int) -> None:
    for nth in range(1, 5):  # the fifth piece is a single block
        faults = Faults().fail(op, nth, short=short)  # type: ignore[arg-type]
        store = make(tmp_path, faults)
        round_trip(store)
        assert faults.hits == 1
        assert faults.calls[op] == 5 + 1  # type: ignore[index]
        store.close()


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_an_interrupted_transfer_is_repeated(tmp_path: Path, op: str, number: int) -> None:
    faults = Faults()
    for nth in (1, 2, 4, 6):
        faults.fail(op, nth, errno=number)  # type: ignore[arg-type]
    store = make(tmp_path, faults)
    round_trip(store)
    assert faults.hits == 4
    assert store.stats.read_retries == 0
    store.close()


@pytest.mark.parametrize(("op", "error"), [("write", StoreWriteError), ("read", StoreReadError)])
def test_a_transfer_without_progress_is_an_error_and_not_a_loop(
    tmp_path: Path, op: str, error: type[SwapError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memo.swap.disk.transfer._BARREN_PAUSE_S", 0.0)
    for fault in ({"short": 0}, {"short": 100}, {"errno": errno.EAGAIN}, {"errno": errno.EINTR}):
        store = make(tmp_path, Faults().fail(op, 1, sticky=True, **fault))  # type: ignore[arg-type]
        with pytest.raises(error):
            round_trip(store)
        store.close()


def test_a_file_cut_short_is_a_read_error(tmp_path: Path) -> None:
    faults = Faults()
    store = make(tmp_path, faults)
    extent = store.reserve(SIZE)
    store.write(extent, random_bytes(SIZE)).synchronize()
    os.ftruncate(faults.files[0].fd, 2 * BLOCK)
    with pytest.raises(StoreReadError, match="end of file"):
        store.read(extent, aligned_empty(SIZE)).synchronize()
    store.close()


def test_a_real_short_write_ends_in_the_error_behind_it(tmp_path: Path) -> None:
    # The limit cuts a write in the middle, and only the next call says why.
    result = python(
        """
        import resource
        from memo.errors import StoreWriteError
        store = DiskStore([sys.argv[1]], 1 << 20)
        extent = store.reserve(65536)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        try:
            store.write(extent, torch.ones(16384, dtype=torch.uint8)).synchronize()
        except StoreWriteError as error:
            print(error)
        store.close()
        """,
        tmp_path,
    )
    assert "EFBIG" in result.stdout, result.stderr


# Row 4: bytes that are not those written


def _flip(fd: int) -> None:
    block = aligned_empty(4096)
    view = memoryview(block.numpy())
    os.preadv(fd, [view], BLOCK)
    block[17] ^= 1
    os.pwrite(fd, view, BLOCK)


def _swap(fd: int) -> None:
    first, second = aligned_empty(BLOCK), aligned_empty(BLOCK)
    for block, offset in ((first, 0), (second, BLOCK)):
        os.preadv(fd, [memoryview(block.numpy())], offset)
    for block, offset in ((second, 0), (first, BLOCK)):
        os.pwrite(fd, memoryview(block.numpy()), offset)


def _tear(fd: int) -> None:
    os.pwrite(fd, memoryview(aligned_empty(4096).zero_().numpy()), 4 * BLOCK)


@pytest.mark.parametrize("damage", [_flip, _swap, _tear])
@pytest.mark.parametrize("verify", [True, False])
def test_damage_is_caught_when_verifying_and_unseen_otherwise(tmp_path: Path, damage: object, verify: bool) -> None:
    faults = Faults()
    store = make(tmp_path, faults, verify=verify)
    extent, source, target = store.reserve(SIZE), random_bytes(SIZE), aligned_empty(SIZE)
    store.write(extent, source).synchronize()
    damage(faults.files[0].fd)  # type: ignore[operator]
    read = store.read(extent, target)
    if verify:
        with pytest.raises(CorruptBlock, match="not the bytes that were written"):
            read.synchronize()
        assert store.stats.read_errors > 0
    else:
        read.synchronize()
        assert not torch.equal(source, target)
    store.close()


def test_a_write_that_never_reached_the_disk_is_caught_as_stale(tmp_path: Path) -> None:
    faults = Faults()
    store = make(tmp_path, faults, verify=True)
    extent = store.reserve(SIZE)
    store.write(extent, random_bytes(SIZE, 1)).synchronize()
    real = faults.files[0].pwrite
    faults.files[0].pwrite = lambda data, offset: len(data) if offset == BLOCK else real(data, offset)  # type: ignore[method-assign]
    store.write(extent, random_bytes(SIZE, 2)).synchronize()
    with pytest.raises(CorruptBlock):
        store.read(extent, aligned_empty(SIZE)).synchronize()
    store.close()


def test_a_verified_read_takes_all_that_was_written(tmp_path: Path) -> None:
    store = make(tmp_path, Faults(), verify=True)
    extent = store.reserve(SIZE)
    store.write(extent, random_bytes(SIZE)).synchronize()
    with pytest.raises(ValueError, match=f"all {SIZE}"):
        store.read(extent, aligned_empty(4096))
    store.close()


# Row 5: slow and stalled


def test_a_stalled_operation_is_named_while_it_is_waited_for(tmp_path: Path) -> None:
    faults = Faults().fail("write", 1, delay=0.2)
    store = DiskStore([tmp_path], 1 << 20, stall_warning_s=0.02, open_file=faults.open)
    write = store.write(store.reserve(4096), random_bytes(4096))
    with pytest.warns(RuntimeWarning, match=r"write of 4096 bytes at offset 0 .* not finished .*running.*stalled"):
        write.synchronize()
    store.close()


def test_a_slow_disk_changes_no_byte_and_shows_in_the_busy_time(tmp_path: Path) -> None:
    store = make(tmp_path, Faults().fail("write", 1, delay=0.01, sticky=True), threads=1)
    round_trip(store)
    assert store.stats.write_busy_s >= 5 * 0.01
    store.close()


# A thread that ends


def _kill(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def test_killed_threads_go_on(tmp_path: Path) -> None:
    store = make(tmp_path, Faults(), threads=2)
    threads = [thread for thread in store._pool._threads if thread.is_alive()]
    for _ in range(3):
        for thread in threads:
            _kill(thread)
        round_trip(store)
    assert len(threads) == 2
    assert all(thread.is_alive() for thread in threads)
    store.close()


def test_a_thread_killed_with_a_piece_fails_its_operation_and_no_other(tmp_path: Path) -> None:
    faults = Faults()
    store = make(tmp_path, faults, threads=1)
    real = IoPool._piece_done

    def die(pool: IoPool, *arguments: object) -> None:
        pool._piece_done = real.__get__(pool)  # type: ignore[method-assign]
        raise SystemExit

    store._pool._piece_done = die.__get__(store._pool)  # type: ignore[method-assign]
    with pytest.raises(StoreWriteError, match="SystemExit"):
        round_trip(store)
    round_trip(store)
    assert store.stats.used_bytes == 0
    store.close()


_at_any_instant = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="a thread killed as it enters `with lock` leaves it locked: docs/versions.md"
)


@_at_any_instant
def test_a_gate_thread_that_is_killed_goes_on(tmp_path: Path) -> None:
    store = make(tmp_path, Faults(), threads=1)
    for _ in range(2):
        copy = ManualEvent()
        write = store.write(extent := store.reserve(SIZE), source := random_bytes(SIZE), after=[copy])
        _kill(store._pool._gate_threads[0])
        copy.fire()
        with contextlib.suppress(StoreWriteError):  # killed while it waited for the copy, or before
            write.synchronize()
            store.read(extent, target := aligned_empty(SIZE)).synchronize()
            assert torch.equal(source, target)
        store.release(extent)
    round_trip(store)
    store.close()


def _killer(thread: str, nth: int) -> tuple[Callable[..., None], threading.Event]:
    """A profile function that raises, in threads of that name, at the nth place where an exception from outside may come."""
    places, died = itertools.count(1), threading.Event()
    ours = (io_threads.__file__, operation.__file__, threading.__file__)
    outside = ("_bootstrap_inner", "run", "_go_on")

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_return") or died.is_set() or not threading.current_thread().name.startswith(thread):
            return
        code = frame.f_code
        if code.co_filename in ours and code.co_name not in outside and next(places) == nth:
            died.set()
            raise SystemExit

    return profile, died


@_at_any_instant
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("thread", ["memo-disk-0", "memo-disk-gate"])
def test_a_thread_killed_at_any_of_its_calls_leaves_no_operation_undone(
    thread: str, fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for nth in itertools.count(1):
        faults, copy = Faults(), ManualEvent()
        profile, died = _killer(thread, nth)
        threading.setprofile(profile)
        try:
            store = make(tmp_path, faults, threads=1)
            extent = store.reserve(SIZE)
            assert extent is not None
            if fails:  # where the thread isn't killed before
                faults.fail("write", 2, errno=errno.EIO)
            write = store.write(extent, random_bytes(SIZE), after=[copy])
            copy.fire()
            assert write._wait(20), f"killed at call {nth}, and the write is {write.stage.value}"
        finally:
            threading.setprofile(None)
        killed = died.is_set()
        died.set()  # a thread whose nth call is still to come goes free
        faults.clear()
        assert extent.pending == 0, nth
        assert write.failure is not None or not fails, nth
        if write.failure is None:
            store.read(extent, target := aligned_empty(SIZE)).synchronize()
            assert torch.equal(target, random_bytes(SIZE)), nth
        store.release(extent)
        round_trip(store)
        store.close()
        assert not any(one.is_alive() for one in store._pool._threads + store._pool._gate_threads), nth
        if not killed:
            break
    assert nth > 20


# Row 2a: one of several drives fails.


class Drives:
    """A store over two directories, of which the second fails as scripted."""

    def __init__(self, folder: Path, lost: Faults, capacity: int | None = 1 << 20, spare_bytes: int = 0) -> None:
        self.good, self.lost = Faults(), lost
        self.names = {folder / "good": self.good, folder / "lost": lost}
        for name in self.names:
            name.mkdir(exist_ok=True)
        self.store = DiskStore(
            list(self.names),
            capacity,
            block_bytes=BLOCK,
            spare_bytes=spare_bytes,
            open_file=lambda name: self.names[name].open(name),
        )


@pytest.mark.parametrize("capacity", [1 << 20, None])
def test_writes_that_fail_on_one_drive_of_two_go_to_the_other(tmp_path: Path, capacity: int | None) -> None:
    for nth in (1, 2, 3):
        drives = Drives(tmp_path, Faults().fail("write", nth, errno=errno.EIO, sticky=True), capacity)
        store = drives.store
        round_trip(store)
        assert bool(store.stats.write_errors) == (nth < 3), "two of the five pieces are on the second drive"
        if nth == 3:
            continue
        with pytest.warns(RuntimeWarning, match=rf"write of .*/lost failed: EIO.*scratch remain in {tmp_path}/good\."):
            round_trip(store, seed=1)
        calls = drives.lost.calls.copy()
        for seed in range(3):
            round_trip(store, seed)
        assert drives.lost.calls == calls
        assert drives.lost.files[0].fd == -1, "its blocks are free"
        assert [file.fd >= 0 for file in drives.good.files] == [True, False], "so is what took the rest of the step"
        assert store.stats.capacity_bytes >= SIZE
        if capacity is not None:
            assert store.stats.capacity_bytes == capacity
        store.close()


@pytest.mark.parametrize("capacity", [1 << 20, None])
def test_a_drive_of_two_that_cannot_be_read_is_named_and_left_out(tmp_path: Path, capacity: int | None) -> None:
    drives = Drives(tmp_path, Faults().fail("read", 1, errno=errno.EIO, sticky=True), capacity)
    with pytest.raises(StoreReadError, match=rf"in {tmp_path}/lost failed: EIO .*take {tmp_path}/lost out of disk="):
        round_trip(drives.store)
    with pytest.warns(RuntimeWarning, match=rf"read of .*/lost failed: EIO.*scratch remain in {tmp_path}/good\."):
        round_trip(drives.store)
    drives.store.close()


def test_pieces_that_lie_elsewhere_are_overwritten_read_in_part_and_verified(tmp_path: Path) -> None:
    drives = Drives(tmp_path, Faults().fail("write", 1, errno=errno.ENOSPC, sticky=True))
    store = drives.store
    extent = store.reserve(SIZE)
    assert extent is not None
    store.write(extent, random_bytes(BLOCK + 5)).synchronize()
    for seed in range(3):
        source, target = random_bytes(SIZE, seed), aligned_empty(SIZE)
        store.write(extent, source).synchronize()
        store.read(extent, target[: BLOCK + 10]).synchronize()
        assert torch.equal(target[: BLOCK + 10], source[: BLOCK + 10])
        store.read(extent, target).synchronize()
        assert torch.equal(target, source)
    assert store.stats.used_bytes == extent.nbytes
    nbytes = os.fstat(drives.good.files[1].fd).st_size
    for seed in range(3):  # while another extent is held
        round_trip(store, seed)
    assert nbytes < os.fstat(drives.good.files[1].fd).st_size <= 2 * nbytes
    store.release(extent)
    store.close()
    assert all(file.fd == -1 for faults in drives.names.values() for file in faults.files)


def test_where_no_other_drive_has_room_the_write_is_an_error(tmp_path: Path) -> None:
    drives = Drives(tmp_path, Faults().fail("write", 1, errno=errno.EIO, sticky=True))
    drives.good.next("fallocate", errno=errno.ENOSPC, sticky=True)
    with pytest.raises(StoreWriteError, match=rf"in {tmp_path}/lost failed: EIO"):
        round_trip(drives.store)
    drives.store.close()


def test_two_drives_that_fail_in_one_step_are_tried_again(tmp_path: Path) -> None:
    drives = Drives(tmp_path, Faults().fail("write", 1, errno=errno.EIO))
    drives.good.fail("write", 1, errno=errno.EIO).fail("write", 2, errno=errno.EIO)
    with pytest.raises(StoreWriteError):
        round_trip(drives.store)
    for seed in range(3):
        round_trip(drives.store, seed)
    assert len(drives.store._space._striped) == 2
    drives.store.close()


def test_where_what_is_left_has_no_room_for_the_budget_it_has_its_own_share(tmp_path: Path) -> None:
    drives = Drives(tmp_path, Faults().fail("read", 1, errno=errno.EIO, sticky=True), 8 * BLOCK, spare_bytes=1 << 30)
    with pytest.raises(StoreReadError):
        round_trip(drives.store)
    drives.good.next("fallocate", errno=errno.ENOSPC)
    with pytest.warns(RuntimeWarning, match="64 KiB of scratch remain"):
        assert drives.store.reserve(5 * BLOCK) is None
    assert drives.store.refusal == f"64 KiB of scratch in {tmp_path}/good are used up"
    assert drives.store.reserve(4 * BLOCK) is not None
    drives.store.close()


def test_a_drive_that_cannot_grow_is_left_out_where_another_can(tmp_path: Path) -> None:
    drives = Drives(tmp_path, Faults().fail("fallocate", 1, errno=errno.EIO, sticky=True), None)
    round_trip(drives.store)
    assert drives.lost.calls["write"] == 0
    with pytest.warns(
        RuntimeWarning, match=rf"{tmp_path}/lost does not take a file of .*EIO.*remain in {tmp_path}/good\."
    ):
        round_trip(drives.store)
    drives.store.close()


@pytest.mark.parametrize("capacity", [1 << 20, None])
def test_a_drive_that_cannot_reserve_is_named(tmp_path: Path, capacity: int | None) -> None:
    faults = Faults().fail("fallocate", 1, errno=errno.EIO, sticky=True)
    with pytest.raises(ScratchUnusable, match=rf"{tmp_path} does not take a file of .* EIO .*; check that drive"):
        DiskStore([tmp_path], capacity, spare_bytes=0, open_file=faults.open).reserve(4096)
    assert all(file.fd == -1 for file in faults.files) or capacity is None
