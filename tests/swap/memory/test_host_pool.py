"""Jobs that share a host budget: never more than it in sum, whatever ends how."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
from pathlib import Path

import pytest
from race_checker import CheckingBackend

from memo.errors import HostPoolUnusable
from memo.swap import HostPool
from memo.swap.tiers import HostTier

PAGE = 4096


def locked(path: Path) -> list[tuple[int, int]]:
    """Ranges of a file that are locked, as the kernel tells; nobody may change them meanwhile."""
    found = path.stat()
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    before = None
    while True:  # the list is read page by page while others' locks come and go: what is read twice the same is right
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        now = sorted((int(line[6]), int(line[7]) + 1) for line in lines if line[5] == device)
        if now == before:
            return now
        before = now


def held(path: Path) -> int:
    return sum(stop - start for start, stop in locked(path))


def test_each_byte_of_the_budget_is_held_once(tmp_path: Path) -> None:
    path, draw = tmp_path / "pool", random.Random(0)
    pools = [HostPool(path, 100) for _ in range(4)]
    wanted = [0] * 4
    refused = 0
    for _ in range(2000):
        which, nbytes = draw.randrange(4), draw.randrange(101)
        fits = sum(wanted) - wanted[which] + nbytes <= 100
        assert pools[which].resize(nbytes) is fits
        refused += not fits
        if fits:
            wanted[which] = nbytes
        assert [pool.held for pool in pools] == wanted
        assert pools[0].free == 100 - sum(wanted)
        ranges = locked(path)
        assert held(path) == sum(wanted)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
        assert not ranges or ranges[-1][1] <= 100
    assert 500 < refused < 1500
    for pool in pools:
        pool.close()
    assert locked(path) == []


def test_threads_that_take_at_once_never_hold_the_same_byte(tmp_path: Path) -> None:
    path, twice, ready = tmp_path / "pool", [], threading.Barrier(4)
    owners, lock = [0] * 100, threading.Lock()

    def mark(ranges: list[tuple[int, int]], was: int, owner: int) -> None:
        with lock:
            for byte in itertools.chain.from_iterable(itertools.starmap(range, ranges)):
                twice.extend([byte] * (owners[byte] != was))
                owners[byte] = owner

    def work(number: int) -> None:
        draw, pool = random.Random(number), HostPool(path, 100)
        ready.wait()
        for _ in range(500):
            pool.resize(draw.randrange(60))
            ranges = list(pool._held)
            mark(ranges, 0, number)
            mark(ranges, number, 0)
        pool.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert twice == []
    assert locked(path) == []


def test_jobs_that_name_other_budgets_keep_each_within_its_own(tmp_path: Path) -> None:
    large, small = HostPool(tmp_path / "pool", 100), HostPool(tmp_path / "pool", 40)
    assert large.resize(30)
    assert not small.resize(11)
    assert small.resize(10)
    assert large.resize(90)
    assert not large.resize(91)
    large.close()
    small.close()


def _tier(path: Path, pages: int) -> HostTier:
    return HostTier(CheckingBackend("lazy"), pages * PAGE, segment_bytes=PAGE, pool=HostPool(path, pages * PAGE))


def test_a_tier_holds_in_the_pool_what_its_slab_has(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    one, other = _tier(path, 8), _tier(path, 8)
    extents = [one.reserve(PAGE) for _ in range(5)]
    assert all(extents)
    assert one.reserved == held(path) == 5 * PAGE
    assert other.obtainable == 3 * PAGE
    assert other.reserve(4 * PAGE) is None  # full, as a budget is
    assert other.reserved == 0
    mine = other.reserve(3 * PAGE)
    assert mine is not None
    assert one.reserve(1) is None
    assert one.obtainable == 5 * PAGE
    for extent in extents:
        extent.tier.release(extent)
    one.end_step()  # its layout needs five pages again, and the slab keeps them
    assert held(path) == 8 * PAGE
    one.close()
    extents.clear()
    del extent
    assert held(path) == 3 * PAGE
    again = other.reserve(5 * PAGE)
    assert again is not None
    mine.tier.release(mine)
    again.tier.release(again)
    other.close()
    del mine, again
    assert held(path) == 0


def test_the_surplus_of_a_slab_goes_back_to_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    backend = CheckingBackend("lazy")
    tier = HostTier(backend, 64 * PAGE, segment_bytes=16 * PAGE, pool=HostPool(path, 64 * PAGE))
    extent = tier.reserve(PAGE)
    assert extent is not None
    assert held(path) == 16 * PAGE
    extent.tier.release(extent)
    tier.end_step()
    assert held(path) == tier.reserved == PAGE
    tier.close()


def test_a_share_is_held_until_the_last_view_of_the_memory_is_gone(tmp_path: Path) -> None:
    tier = _tier(tmp_path / "pool", 8)
    extent = tier.reserve(2 * PAGE)
    assert extent is not None
    tier.close()
    assert held(tmp_path / "pool") == 2 * PAGE
    del extent
    assert held(tmp_path / "pool") == 0


def test_a_tier_without_a_slab_closes_its_pool(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tier = _tier(tmp_path / "pool", 8)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    tier.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_the_system_refuses_is_given_back_to_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = _tier(tmp_path / "pool", 8)
    extent = tier.reserve(PAGE)
    slab = tier._slab

    def refuse(nbytes: int) -> None:
        slab.nbytes = PAGE
        raise MemoryError

    monkeypatch.setattr(slab, "wait", refuse)
    with pytest.raises(MemoryError):
        tier.reserve(2 * PAGE)
    assert held(tmp_path / "pool") == PAGE
    assert extent is not None
    extent.tier.release(extent)
    tier.close()


def test_a_forked_process_holds_nothing(tmp_path: Path) -> None:
    """A data loader's worker that outlives its parent would keep the parent's share."""
    path = tmp_path / "pool"
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        pool = HostPool(path, 100)
        pool.resize(60)
        worker = os.fork()
        if worker == 0:
            signal.pause()
        os.write(writer, str(worker).encode())
        signal.pause()
    worker = int(os.read(reader, 20))
    try:
        assert held(path) == 60
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        assert held(path) == 0
        os.kill(worker, 0)  # lives still
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_removed_file_warns_once_and_the_job_takes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    pool = HostPool(path, 100)
    assert pool.resize(10)
    path.unlink()
    with pytest.warns(RuntimeWarning, match="was removed: jobs that start now do not see the 10 B"):
        assert not pool.resize(11)
    assert not pool.resize(12)  # a second warning would be an error
    assert pool.resize(5)
    pool.close()


def test_any_content_and_any_age_of_the_file_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b'{"format": "memo-pool", "held": 1e400' + bytes(range(256)))
    before = path.read_bytes()
    pool = HostPool(path, 100)
    assert pool.free == 100
    assert pool.resize(100)
    pool.close()
    assert path.read_bytes() == before


def _directory(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


UNUSABLE = {
    "directory": (_directory, "Is a directory"),
    "pipe": (os.mkfifo, "not a regular file"),
    "socket": (_socket, "No such device or address"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_no_file_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    make, reason = UNUSABLE[kind]
    make(tmp_path / "pool")
    _is_refused(tmp_path / "pool", reason)


def _is_refused(path: Path, reason: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HostPoolUnusable, match=reason) as error:
        HostPool(path, 100)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_in_no_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    _is_refused(tmp_path / "none" / "pool", "No such file or directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_a_file_that_may_not_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pool").touch(0o444)
    _is_refused(tmp_path / "pool", "Permission denied")


def test_a_system_that_refuses_the_write_or_the_lock_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memo.swap.memory.host_pool._GET", None)
    _is_refused(tmp_path / "pool", "no locks that belong to an open file")

    def refused(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(HostPoolUnusable, match="Permission denied"):
        HostPool(tmp_path / "pool", 100)
