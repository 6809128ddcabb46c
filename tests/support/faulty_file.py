"""A scratch file that fails as scripted, and an event that the test fires: what disk tests put under the store."""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memo.swap.disk import DiskStore, RawFile

if TYPE_CHECKING:
    import pytest

Operation = Literal["write", "read", "fallocate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    op: Operation
    nth: int
    errno: int | None
    sticky: bool
    short: int | None
    delay: float
    flip: bool


class Faults:
    """A script shared by all files of a store: the nth write, read or fallocate (from 1) goes wrong."""

    def __init__(self) -> None:
        self.calls: dict[Operation, int] = {"write": 0, "read": 0, "fallocate": 0}
        self.hits = 0
        self.files: list[FaultyFile] = []
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()

    def fail(
        self,
        op: Operation,
        nth: int,
        *,
        errno: int | None = None,
        sticky: bool = False,
        short: int | None = None,
        delay: float = 0.0,
        flip: bool = False,
    ) -> Faults:
        """An errno, a transfer cut to `short` bytes, a delay or a flipped bit; `sticky` repeats it for every later call."""
        self._faults.append(_Fault(op=op, nth=nth, errno=errno, sticky=sticky, short=short, delay=delay, flip=flip))
        return self

    def next(self, op: Operation, **fault: Any) -> Faults:
        """As `fail`, for the next call."""
        return self.fail(op, self.calls[op] + 1, **fault)

    def clear(self) -> None:
        """Ends all faults, and forgets closed files."""
        self._faults.clear()
        self.files = [file for file in self.files if file.fd >= 0]

    def open(self, directory: Path) -> FaultyFile:
        """For DiskStore's `open_file`."""
        self.files.append(FaultyFile(directory, self))
        return self.files[-1]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts faulty files under every store made during the test, also those that memo.offload makes."""
        monkeypatch.setitem(DiskStore.__init__.__kwdefaults__, "open_file", self.open)

    def meet(self, op: Operation, nbytes: int) -> tuple[int, bool]:
        """How many of `nbytes` this call may move, and whether a bit flips; raises or sleeps where the script says so."""
        with self._lock:
            self.calls[op] += 1
            count = self.calls[op]
            faults = [
                fault
                for fault in self._faults
                if fault.op == op and (count == fault.nth or (fault.sticky and count > fault.nth))
            ]
            self.hits += len(faults)
        for fault in faults:
            time.sleep(fault.delay)
            if fault.errno is not None:
                raise OSError(fault.errno, os.strerror(fault.errno))
            if fault.short is not None:
                nbytes = min(nbytes, fault.short)
        return nbytes, any(fault.flip for fault in faults)


class FaultyFile(RawFile):
    """A real anonymous file whose calls pass through the script first."""

    def __init__(self, directory: Path, faults: Faults) -> None:
        super().__init__(directory)
        self._faults = faults

    def pwrite(self, data: memoryview, offset: int) -> int:
        allowed, flips = self._faults.meet("write", len(data))
        if flips:
            with mmap.mmap(-1, len(data)) as copy, memoryview(copy) as view:  # O_DIRECT takes aligned memory only
                view[:] = data
                view[0] ^= 1
                return super().pwrite(view, offset)
        if allowed == len(data):
            return super().pwrite(data, offset)
        # The device itself takes whole blocks only; a kernel may still report fewer bytes than it moved.
        super().pwrite(data, offset) if allowed else None
        return allowed

    def pread(self, data: memoryview, offset: int) -> int:
        allowed, flips = self._faults.meet("read", len(data))
        if allowed == len(data):
            count = super().pread(data, offset)
            data[0] ^= flips
            return count
        whole = allowed - allowed % 4096
        if whole:
            super().pread(data[:whole], offset)
        return allowed

    def fallocate(self, nbytes: int) -> None:
        self._faults.meet("fallocate", nbytes)
        super().fallocate(nbytes)


class ManualEvent:
    """An event that the test fires, perhaps with a failure."""

    def __init__(self) -> None:
        self._fired = threading.Event()
        self._failure: Exception | None = None

    def fire(self, failure: Exception | None = None) -> None:
        self._failure = failure
        self._fired.set()

    def query(self) -> bool:
        return self._fired.is_set()

    def synchronize(self) -> None:
        self._fired.wait()
        if self._failure is not None:
            raise self._failure
