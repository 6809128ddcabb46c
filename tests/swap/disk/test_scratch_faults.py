"""A scratch file among directories, file systems, other jobs, processes and signals: nothing is left, met or followed."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import threading
import time
import uuid
import warnings
from pathlib import Path

import pytest
from faulty_file import Faults
from faulty_store import make, python, round_trip

from memo.errors import ScratchFull, ScratchUnusable
from memo.swap.disk import DiskStore

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


@pytest.mark.promise("R9")
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


@pytest.mark.promise("R9")
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
