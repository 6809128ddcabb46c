"""The faults of a soak: what each does, and the errors that may come of it."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from faulty_file import Faults, Operation

from memo.errors import CorruptBlock, MemoError, StoreReadError, StoreWriteError
from tests.soak.pressure import Pressure

_SLOW_S = 0.02
_SOON_S = 0.03
_TAKEN_BYTES = 16 << 20
_HELD_STEPS = 5
"""Steps that memory is taken or limited for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault."""

    errors: tuple[type[MemoError], ...] = ()
    """What the step may end in instead of the loss of the undisturbed run; empty: nothing."""
    operation: Operation | None = None
    """Of the scratch file that meets it; None: not one of its operations."""
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of Faults.fail."""


def _of_file(operation: Operation, *errors: type[MemoError], **given: Any) -> Kind:
    return Kind(operation=operation, errors=errors, given=given)


STOPPED = "process stopped for a second"
KILLED = "I/O thread killed"
TAKEN = f"{_TAKEN_BYTES >> 20} MiB of the budget taken"
PRESSED = "memory limited by a cgroup"
KINDS: dict[str, Kind] = {
    "one write failed (EIO)": _of_file("write", StoreWriteError, errno=errno.EIO),
    "all writes failed (ENOSPC)": _of_file("write", StoreWriteError, errno=errno.ENOSPC, sticky=True),
    "one read failed (EIO)": _of_file("read", errno=errno.EIO),
    "all reads failed (EIO)": _of_file("read", StoreReadError, errno=errno.EIO, sticky=True),
    "short writes": _of_file("write", short=4096, sticky=True),
    "short reads": _of_file("read", short=4096, sticky=True),
    "slow writes": _of_file("write", delay=_SLOW_S, sticky=True),
    "slow reads": _of_file("read", delay=_SLOW_S, sticky=True),
    "bit flipped on disk": _of_file("write", CorruptBlock, flip=True),
    "bit flipped in one read": _of_file("read", flip=True),
    KILLED: Kind(errors=(StoreWriteError, StoreReadError)),
    STOPPED: Kind(),
    TAKEN: Kind(),
    PRESSED: Kind(),
}


@dataclasses.dataclass(slots=True)
class Fault:
    """What came of the faults of one kind."""

    injected: int = 0
    met: int = 0
    """By an operation of the run; a step that moves nothing meets none."""
    raised: dict[str, int] = dataclasses.field(default_factory=dict)
    """Errors that a step ended in."""


class Injector:
    """Injects one fault after the other, in an order that a seed draws in which each kind comes once a round.

    Args:
        seed: of the order.
        stop: has another process stop this one for a second, soon; returns at once.
        pressure: limits this process's memory; None: that kind does not come.
    """

    def __init__(self, seed: int, stop: Callable[[], None], pressure: Pressure | None = None) -> None:
        self.script = Faults()
        self.told = {name: Fault() for name in KINDS if name != PRESSED or pressure is not None}
        self._draw = random.Random(seed)
        self._stop = stop
        self._round: list[str] = []
        self._armed: str | None = None
        self._killer: threading.Thread | None = None
        self._taken: mmap.mmap | None = None
        self._pressure = pressure
        self._held_steps = 0

    def inject(self) -> None:
        """Injects the next fault; one that nothing has met yet is waited for instead."""
        if self._armed is not None:
            return
        if not self._round:
            self._round = self._draw.sample(list(self.told), len(self.told))
        self._armed = name = self._round.pop()
        self.told[name].injected += 1
        kind = KINDS[name]
        self.script.hits = 0
        if kind.operation is not None:
            self.script.next(kind.operation, **kind.given)
        elif name == STOPPED:
            self._stop()
            self.script.hits = 1
        elif name == TAKEN:
            self._taken, self._held_steps = mmap.mmap(-1, _TAKEN_BYTES), _HELD_STEPS
            self._taken.write(b"\1" * _TAKEN_BYTES)
        elif name == PRESSED:
            assert self._pressure is not None
            self._pressure.begin()
            self._held_steps = _HELD_STEPS
        else:
            self._killer = threading.Thread(target=self._kill_one, args=(self._draw.uniform(0, _SOON_S),))
            self._killer.start()

    def outcome(self, error: MemoError | None) -> str | None:
        """Notes how a step ended; returns why it should not have ended so, or None."""
        name = self._armed
        if self._killer is not None:
            self._killer.join()
            self._killer = None
        if self._held_steps:
            self._held_steps -= 1
            self._hold_or_give_back()
        if self.script.hits and name is not None:
            self.told[name].met += 1
            self.script.clear()
            self._armed = None
        if error is None:
            return None
        if name is None or self._armed is not None:
            return f"no fault, and {type(error).__name__}: {error}"
        raised, error_name = self.told[name].raised, type(error).__name__
        raised[error_name] = raised.get(error_name, 0) + 1
        return None if type(error) in KINDS[name].errors else f"{name}: {error_name}: {error}"

    def _hold_or_give_back(self) -> None:
        """Goes on with what lasts for some steps, or ends it after the last of them."""
        if self._taken is not None:
            if not self._held_steps:
                self._taken.close()
                self._taken = None
                self.script.hits = 1
        else:
            assert self._pressure is not None
            if self._held_steps:
                self._pressure.press()
            else:
                self.script.hits = int(self._pressure.end())

    def _kill_one(self, after_s: float) -> None:
        """Raises SystemExit in one of the disk tier's threads, wherever it then is."""
        time.sleep(after_s)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("memo-disk")]
        ident = ctypes.c_ulong(self._draw.choice(threads).ident or 0)
        self.script.hits = int(ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)))
