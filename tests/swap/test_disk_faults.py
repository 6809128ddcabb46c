"""Every fault of a disk: the bytes come back exact, or the named error is raised, and the store works on."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import uuid
import warnings
from pathlib import Path

import pytest
import torch
from faulty_file import Faults, ManualEvent

from memo.errors import CorruptBlock, ScratchFull, ScratchUnusable, StoreReadError, StoreWriteError, SwapError
from memo.swap.aligned import aligned_empty
from memo.swap.disk import DiskStore

KIB = 1 << 10
BLOCK = 16 * KIB
SIZE = 4 * BLOCK + 1000  # five pieces, the last with a tail


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return aligned_empty(nbytes).random_(0, 256, generator=torch.Generator().manual_seed(seed))


def make(directory: Path, faults: Faults, *, verify: bool = False, threads: int = 2) -> DiskStore:
    return DiskStore(
        [directory], 1 << 20, block_bytes=BLOCK, threads=threads, verify=verify, rank=3, open_file=faults.open
    )


def round_trip(store: DiskStore, seed: int = 0) -> None:
    """Writes, reads and compares; raises what the store raises."""
    source, target = random_bytes(SIZE, seed), aligned_empty(SIZE)
    extent = store.reserve(SIZE)
    assert extent is not None
    try:
        store.write(extent, source).synchronize()
        store.read(extent, target).synchronize()
        assert torch.equal(source, target)
        assert torch.equal(source, random_bytes(SIZE, seed)), "a source is never touched"
    finally:
        store.release(extent)


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    program = "import sys, os, torch\nfrom memo.swap.disk import DiskStore\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


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
    with pytest.raises(StoreWriteError, match=rf"rank 3: write of {SIZE} bytes at offset 0 .*ENOSPC"):
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
    store = DiskStore([tmp_path], 1 << 20, rank=3, open_file=faults.open)
    with pytest.raises(StoreReadError, match=rf"rank 3: read of {SIZE} bytes at offset 0 .*{tmp_path}.*EIO"):
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
    monkeypatch.setattr("memo.swap.transfer._BARREN_PAUSE_S", 0.0)
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


# Row 6: the process ends

PENDING = """
class Never:
    def query(self): return False
    def synchronize(self):
        import threading; threading.Event().wait()
store = DiskStore([sys.argv[1]], 64 << 20)
source = torch.ones(8 << 20, dtype=torch.uint8)
running = [store.write(store.reserve(8 << 20), source) for _ in range(6)]
stuck = store.write(store.reserve(4096), source[:4096], after=[Never()])
print("ready", flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("raise RuntimeError('the training script failed')", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_a_process_that_ends_with_operations_pending_leaves_nothing_and_does_not_hang(
    tmp_path: Path, ending: str, code: int
) -> None:
    result = python(PENDING + ending, tmp_path)
    assert result.returncode == code, result.stderr
    assert "ready" in result.stdout
    assert list(tmp_path.iterdir()) == []
    assert "Fatal" not in result.stderr


# Row 7: directories and file systems that will not do


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScratchUnusable, match=r"absent.*ENOENT"):
        DiskStore([tmp_path / "absent"], 4096)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ScratchUnusable, match="ENOTDIR"):
        DiskStore([tmp_path / "file"], 4096)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_directory_of_somebody_else_is_refused() -> None:
    directory = Path("/var/tmp") / f"memo-test-{uuid.uuid4().hex}"
    directory.mkdir(mode=0o755)
    try:
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(65534)
                DiskStore([directory], 4096)
            except ScratchUnusable as error:
                os._exit(0 if "EACCES" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        directory.rmdir()


def test_a_read_only_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_open(monkeypatch, lambda flags: errno.EROFS if flags & os.O_RDWR else None)
    with pytest.raises(ScratchUnusable, match="EROFS"):
        DiskStore([tmp_path], 4096)


def _refuse_open(monkeypatch: pytest.MonkeyPatch, refusal: object) -> None:
    real = os.open

    def fake(path: object, flags: int, *args: object, **options: object) -> int:
        number = refusal(flags)  # type: ignore[operator]
        if number is not None:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", fake)


def _is_tmpfile(flags: int) -> bool:
    return flags & os.O_TMPFILE == os.O_TMPFILE


def test_a_file_system_without_o_direct_works_through_the_cache_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_open(monkeypatch, lambda flags: errno.EINVAL if flags & os.O_DIRECT else None)
    with pytest.warns(RuntimeWarning, match="no O_DIRECT") as caught:
        store = DiskStore([tmp_path], 1 << 20)
    assert len(caught) == 1
    round_trip(store)
    store.close()


def test_a_device_that_refuses_direct_writes_works_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such alignment")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.warns(RuntimeWarning, match="no O_DIRECT"):
        store = DiskStore([tmp_path], 1 << 20)
    round_trip(store)
    store.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR])
def test_without_unnamed_files_the_name_is_gone_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _refuse_open(monkeypatch, lambda flags: number if _is_tmpfile(flags) else None)
    faults = Faults()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = make(tmp_path, faults)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(faults.files[0].fd).st_nlink == 0
    round_trip(store)
    store.close()


def test_without_block_reservation_space_is_still_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.warns(RuntimeWarning, match="cannot reserve blocks"):
        store = DiskStore([tmp_path], 1 << 20)
    round_trip(store)
    store.close()
    with pytest.raises(ScratchFull):
        DiskStore([tmp_path], 1 << 50)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_a_tmpfs_works() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = DiskStore(["/dev/shm"], 1 << 20)
    round_trip(store)
    store.close()


# Row 8: hostile neighbours in a shared directory


def test_a_world_writable_directory_needs_the_sticky_bit(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ScratchUnusable, match="sticky"):
        DiskStore([tmp_path], 4096)
    tmp_path.chmod(0o1777)
    DiskStore([tmp_path], 4096).close()


@pytest.mark.parametrize("plant", ["file", "symlink", "hard link"])
def test_a_planted_name_is_never_followed_opened_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    victim, scratch = tmp_path / "victim", tmp_path / "scratch"
    scratch.mkdir()
    victim.write_text("precious")
    known = uuid.UUID(int=1)
    monkeypatch.setattr(uuid, "uuid4", lambda: known)
    planted = scratch / f".memo-{known.hex}"
    {
        "file": lambda: planted.write_text("precious"),
        "symlink": lambda: planted.symlink_to(victim),
        "hard link": lambda: planted.hardlink_to(victim),
    }[plant]()
    _refuse_open(monkeypatch, lambda flags: errno.EOPNOTSUPP if _is_tmpfile(flags) else None)
    with pytest.raises(ScratchUnusable, match="EEXIST"):
        DiskStore([scratch], 4096)
    assert victim.read_text() == planted.read_text() == "precious"


@pytest.mark.parametrize("named", [False, True])
def test_scratch_is_private_and_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    if named:
        _refuse_open(monkeypatch, lambda flags: errno.EOPNOTSUPP if _is_tmpfile(flags) else None)
    before = os.umask(0)
    try:
        faults = Faults()
        store = make(tmp_path, faults)
    finally:
        os.umask(before)
    status = os.fstat(faults.files[0].fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert not os.get_inheritable(faults.files[0].fd)
    store.close()


# Row 9: several jobs, one directory


def test_jobs_in_one_directory_never_meet(tmp_path: Path) -> None:
    code = """
    mark = int(sys.argv[2])
    source, target = torch.full((1 << 20,), mark, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    store = DiskStore([sys.argv[1]], 8 << 20)
    extent = store.reserve(1 << 20)
    for _ in range(10):
        store.read(extent, target, after=[store.write(extent, source)]).synchronize()
        assert torch.equal(source, target)
    store.close()
    """
    results: list[subprocess.CompletedProcess[str]] = []
    jobs = [threading.Thread(target=lambda m=mark: results.append(python(code, tmp_path, m))) for mark in (1, 2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [result.returncode for result in results] == [0, 0], results
    assert list(tmp_path.iterdir()) == []


def test_the_longest_directory_name_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_open(monkeypatch, lambda flags: errno.EOPNOTSUPP if _is_tmpfile(flags) else None)
    deep = tmp_path / ("x" * 255)
    deep.mkdir()
    store = DiskStore([deep], 1 << 20)
    round_trip(store)
    store.close()


# Row 22: forks, signals, programs started


def test_a_forked_child_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    result = python(
        """
        import signal, threading
        from memo.errors import SwapError
        store = DiskStore([sys.argv[1]], 64 << 20)
        source, target = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8), torch.empty(8 << 20, dtype=torch.uint8)
        extent = store.reserve(8 << 20)
        write = store.write(extent, source)
        held, go_on = threading.Event(), threading.Event()
        def hold():  # what a thread may be doing just when another one forks
            with store._pool._changed:
                held.set()
                go_on.wait()
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        pid = os.fork()
        if pid:
            go_on.set()
        else:
            signal.alarm(10)
            try:
                store.write(extent, source)
            except SwapError as error:
                store.close()
                print(error, flush=True)
                sys.exit(0)
            sys.exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        store.read(extent, target, after=[write]).synchronize()
        assert torch.equal(source, target)
        store.close()
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "forked" in result.stdout


def test_a_program_started_meanwhile_inherits_no_scratch(tmp_path: Path) -> None:
    faults = Faults()
    store = make(tmp_path, faults)
    listing = subprocess.run(
        ["/bin/ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True, close_fds=False
    )
    assert str(tmp_path) not in listing.stdout
    store.close()


def test_signals_during_transfers_change_nothing(tmp_path: Path) -> None:
    store = make(tmp_path, Faults())
    arrived: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: arrived.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        deadline = time.monotonic() + 5
        while len(arrived) < 20 and time.monotonic() < deadline:
            round_trip(store)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(arrived) >= 20
    store.close()
