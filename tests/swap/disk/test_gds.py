"""The GPUDirect path over a stand-in kvikio: the same calls, put on streams that run when the test says so."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faulty_file import ManualEvent

from memo.errors import ScratchFull, ScratchUnusable, StoreReadError, StoreWriteError, SwapError
from memo.swap.disk import GdsDisk


class Stream:
    """Runs its work when `drain` is called, or somebody waits for it."""

    def __init__(self) -> None:
        self.cuda_stream = id(self)
        self.stream = self
        self.work: list[Callable[[], object]] = []
        self.done = 0
        STREAMS[self.cuda_stream] = self

    def put(self, work: Callable[[], object]) -> int:
        self.work.append(work)
        return len(self.work)

    def drain(self) -> None:
        while self.done < len(self.work):
            self.work[self.done]()
            self.work[self.done] = lambda: None  # a stream lets go of what it has run
            self.done += 1

    def wait(self, event: Any) -> None:
        self.put(event.synchronize)


STREAMS: dict[int, Stream] = {}


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.position = len(stream.work)

    def query(self) -> bool:
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        self.stream.drain()


class Future:
    def __init__(self, stream: Stream, move: Callable[[], int]) -> None:
        self.stream = stream
        self.result: int | RuntimeError | None = None
        stream.put(lambda: self._run(move))

    def _run(self, move: Callable[[], int]) -> None:
        try:
            self.result = move()
        except RuntimeError as error:
            self.result = error

    def check_bytes_done(self) -> int:
        self.stream.drain()
        if isinstance(self.result, RuntimeError):
            raise self.result
        assert self.result is not None
        return self.result


class CuFile:
    def __init__(self, library: Kvikio, path: str, flags: str) -> None:
        assert flags == "r+", "'w' would truncate the reserved file"
        self.kvikio = library
        self.fd = os.open(path, os.O_RDWR)
        library.opened.append(self)

    def close(self) -> None:
        os.close(self.fd)
        self.kvikio.opened.remove(self)

    def raw_write_async(self, buf: torch.Tensor, raw: int, size: int, file_offset: int, dev_offset: int) -> Future:
        self.kvikio.refuse_issue()
        view = memoryview(buf.numpy())[dev_offset : dev_offset + size]
        return Future(
            STREAMS[raw], lambda: self.kvikio.meet("write", lambda n: os.pwrite(self.fd, view[:n], file_offset), size)
        )

    def raw_read_async(self, buf: torch.Tensor, raw: int, size: int, file_offset: int, dev_offset: int) -> Future:
        self.kvikio.refuse_issue()
        return Future(STREAMS[raw], lambda: self.raw_read(buf, size, file_offset, dev_offset))

    def raw_read(self, buf: torch.Tensor, size: int, file_offset: int, dev_offset: int) -> int:
        view = memoryview(buf.numpy())[dev_offset : dev_offset + size]
        return self.kvikio.meet("read", lambda n: os.preadv(self.fd, [view[:n]], file_offset), size)


class Kvikio:
    """The part of kvikio that the disk tier uses, with scripted failures."""

    def __init__(self, *, compat: bool = False) -> None:
        self.defaults = SimpleNamespace(is_compat_mode_preferred=lambda: compat)
        self.opened: list[CuFile] = []
        self.faults: dict[str, list[str]] = {"write": [], "read": [], "issue": []}
        self.calls = {"write": 0, "read": 0}

    def CuFile(self, path: str, flags: str) -> CuFile:
        return CuFile(self, path, flags)

    def refuse_issue(self) -> None:
        if self.faults["issue"]:
            raise RuntimeError(self.faults["issue"].pop(0))

    def meet(self, op: str, move: Callable[[int], int], size: int) -> int:
        self.calls[op] += 1
        fault = self.faults[op].pop(0) if self.faults[op] else ""
        if fault == "short":
            return move(size // 2)
        if fault:
            raise RuntimeError(fault)
        return move(size)


def make(directory: Path, kvikio: Kvikio, capacity: int | None = 1 << 20, directories: int = 1) -> GdsDisk:
    return GdsDisk(
        [directory] * directories,
        capacity,
        new_stream=Stream,
        record=StreamEvent,
        block_bytes=8192,
        kvikio=kvikio,
    )


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))


@pytest.mark.parametrize("directories", [1, 2])
@pytest.mark.parametrize("nbytes", [1, 4096, 8192, 30001])
def test_bytes_come_back_over_any_number_of_pieces(tmp_path: Path, directories: int, nbytes: int) -> None:
    disk = make(tmp_path, Kvikio(), directories=directories)
    disk.reserve(4096)  # so that the next one does not begin at a block boundary
    extent, source, target = disk.reserve(nbytes), random_bytes(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    assert extent is not None
    write = disk.write(extent, source)
    read = disk.read(extent, target, after=[write])
    read.synchronize()
    assert torch.equal(source, target)
    disk.release(extent)
    disk.close()


def test_issuing_never_waits(tmp_path: Path) -> None:
    disk = make(tmp_path, Kvikio())
    extent = disk.reserve(4096)
    assert extent is not None
    never = ManualEvent()
    write = disk.write(extent, random_bytes(4096), after=[never])
    assert not write.query()
    with pytest.raises(SwapError, match="1 operations"):
        disk.release(extent)
    never.fire()
    write.synchronize()
    assert write.query()
    disk.release(extent)
    disk.close()


def test_an_extent_is_free_once_its_bytes_arrived_even_if_nobody_waited(tmp_path: Path) -> None:
    disk = make(tmp_path, Kvikio())
    STREAMS.clear()
    extent = disk.reserve(4096)
    assert extent is not None
    disk.write(extent, random_bytes(4096))
    with pytest.raises(SwapError, match="1 operations"):
        disk.release(extent)
    for stream in STREAMS.values():
        stream.drain()
    disk.release(extent)
    disk.close()


def test_each_running_operation_has_a_stream_of_its_own_and_idle_ones_are_reused(tmp_path: Path) -> None:
    disk = make(tmp_path, Kvikio())
    STREAMS.clear()
    writes = [disk.write(disk.reserve(4096), random_bytes(4096)) for _ in range(3)]  # type: ignore[arg-type]
    assert len(STREAMS) == 3
    writes[1].synchronize()
    assert not writes[0].query()
    assert not writes[2].query()
    disk.write(disk.reserve(4096), random_bytes(4096))  # type: ignore[arg-type]
    assert len(STREAMS) == 3
    for _ in range(40):
        disk.write(disk.reserve(4096), random_bytes(4096))  # type: ignore[arg-type]
    assert len(STREAMS) == 16
    disk.close()


def test_the_source_lives_until_its_bytes_are_counted(tmp_path: Path) -> None:
    disk = make(tmp_path, Kvikio())
    STREAMS.clear()
    source = random_bytes(4096)
    alive = weakref.ref(source)
    disk.write(disk.reserve(4096), source)  # type: ignore[arg-type]
    del source
    gc.collect()
    assert alive() is not None
    for stream in list(STREAMS.values()):
        stream.drain()
    disk.write(disk.reserve(4096), random_bytes(4096))  # type: ignore[arg-type]
    gc.collect()
    assert alive() is None
    disk.close()


@pytest.mark.parametrize("fault", ["short", "POSIX error on pwrite: No space left on device"])
def test_a_write_that_did_not_fully_arrive_is_raised(tmp_path: Path, fault: str) -> None:
    kvikio = Kvikio()
    disk = make(tmp_path, kvikio)
    kvikio.faults["write"] = ["", fault]
    extent = disk.reserve(20000)
    write = disk.write(extent, random_bytes(20000))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(StoreWriteError, match=r"^write of 20000 bytes .*8192 bytes at 8192"):
            write.synchronize()
    disk.release(extent)  # type: ignore[arg-type]
    disk.close()


@pytest.mark.parametrize("fault", ["short", "cuFile error 5030"])
def test_a_failed_read_is_retried_twice_and_then_raised(tmp_path: Path, fault: str) -> None:
    kvikio = Kvikio()
    disk = make(tmp_path, kvikio)
    extent, source = disk.reserve(5000), random_bytes(5000)
    assert extent is not None
    disk.write(extent, source).synchronize()
    target = torch.zeros(5000, dtype=torch.uint8)
    kvikio.faults["read"] = [fault] * 2
    disk.read(extent, target).synchronize()
    assert torch.equal(source, target)
    kvikio.faults["read"] = [fault] * 3
    with pytest.raises(StoreReadError, match=r"^read of 5000 bytes"):
        disk.read(extent, target).synchronize()
    assert kvikio.calls["read"] == 6
    disk.close()


def test_an_operation_that_cannot_be_issued_fails_at_synchronize(tmp_path: Path) -> None:
    kvikio = Kvikio()
    disk = make(tmp_path, kvikio)
    extent = disk.reserve(4096)
    assert extent is not None
    kvikio.faults["issue"] = ["invalid device pointer"]
    write = disk.write(extent, random_bytes(4096))
    with pytest.raises(StoreWriteError, match="invalid device pointer"):
        write.synchronize()
    disk.write(extent, random_bytes(4096)).synchronize()
    disk.close()


def test_where_kvikio_would_block_the_caller_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScratchUnusable, match="memo doctor"):
        make(tmp_path, Kvikio(compat=True))


def test_a_machine_without_kvikio_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvikio", None)
    with pytest.raises(ScratchUnusable, match="needs kvikio"):
        GdsDisk([tmp_path], 4096, new_stream=Stream)


def test_kvikios_defaults_are_found_though_the_package_does_not_import_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kvikio 26.10 is made: `import kvikio` alone has no `kvikio.defaults`."""
    package = tmp_path / "kvikio"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "defaults.py").write_text("def is_compat_mode_preferred():\n    return True\n")
    for name in ("kvikio", "kvikio.defaults"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(ScratchUnusable, match="would not use GPUDirect"):
            GdsDisk([tmp_path], 4096, new_stream=Stream)
    finally:
        for name in ("kvikio", "kvikio.defaults"):
            sys.modules.pop(name, None)


def test_a_file_that_cannot_be_registered_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kvikio = Kvikio()
    real, count = kvikio.CuFile, iter(range(9))

    def refuse_second(path: str, flags: str) -> CuFile:
        if next(count):
            raise RuntimeError("cuFileHandleRegister: file system not supported")
        return real(path, flags)

    monkeypatch.setattr(kvikio, "CuFile", refuse_second)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ScratchUnusable, match="not supported"):
        make(tmp_path, kvikio, directories=2)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ScratchFull):
        make(tmp_path, kvikio, capacity=1 << 50)
    assert len(os.listdir("/proc/self/fd")) == before


def test_close_counts_what_is_pending_and_leaves_no_descriptor(tmp_path: Path) -> None:
    kvikio = Kvikio()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    disk = make(tmp_path, kvikio)
    write = disk.write(disk.reserve(4096), random_bytes(4096))  # type: ignore[arg-type]
    disk.close()
    disk.close()
    assert write.query()
    assert kvikio.opened == []
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(SwapError, match="closed"):
        disk.write(disk.reserve(4096), random_bytes(4096))  # type: ignore[arg-type]
