"""ctypes binding of arena.cpp: builds and loads it, and converts its structs to the package's dataclasses.

Owns the ctypes declarations only; counters.h and step_log.h define the numbers. There is one allocator per process, as
in torch. Pointers are integers: a stream is its handle, a block its address.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memo.allocator.step import Divergence, EventKind, MemoryCounters, Reason, StepEvent, StepSummary
from memo.errors import AllocatorError
from memo.mip import build

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ALIGNMENT = 512
"""Bytes; sizes are rounded up to it and offsets are multiples of it. `kAlignment` in step_plan.h."""

MALLOC, FREE, RECORD_STREAM = "memo_arena_malloc", "memo_arena_free", "memo_arena_record_stream"
"""Names of the functions that torch calls."""

_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-pthread")


class Begun(enum.IntEnum):
    """Mode in which a step runs; the numbers are those of counters.h."""

    WATCHING = 0
    """Events are logged; every request is served by the pool."""
    REPLAYING = 1
    """Requests are placed by the plan."""
    BUSY = 2
    """As WATCHING, since the arena must grow and still holds live blocks."""
    NO_ROOM = 3
    """As WATCHING, since the device has no memory for the arena."""


@functools.cache
def library_path() -> Path:
    """Returns the path of the compiled allocator; builds it on first use.

    Raises:
        AllocatorError: It cannot be built.
    """
    source = Path(__file__).with_name("arena.cpp")
    try:
        return build(source, includes=sorted(source.parent.glob("*.h")), flags=_FLAGS)
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip()[-300:] if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise AllocatorError(f"cannot compile the planned allocator: {reason}; it needs a C++20 compiler") from None


def _int64s(of: type[DataclassInstance]) -> list[tuple[str, Any]]:
    return [(field.name, ctypes.c_int64) for field in dataclasses.fields(of)]


class _Event(ctypes.Structure):
    _fields_ = [*_int64s(StepEvent)[1:-1], ("kind", ctypes.c_int32), ("thread", ctypes.c_int32)]


class _Divergence(ctypes.Structure):
    _fields_ = _int64s(Divergence)


class _Summary(ctypes.Structure):
    _fields_ = [*_int64s(StepSummary)[:-1], ("first", _Divergence)]


class _Stats(ctypes.Structure):
    _fields_ = _int64s(MemoryCounters)


def _values(raw: ctypes.Structure) -> dict[str, Any]:
    return {name: getattr(raw, name) for name, *_ in raw._fields_}


class Native:
    """The process's native allocator."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = library_path() if path is None else path
        library = ctypes.CDLL(str(self.path))
        library.memo_arena_open.restype = ctypes.c_char_p
        library.memo_arena_add_plan.restype = ctypes.c_int64
        library.memo_arena_events.restype = ctypes.c_int64
        library.memo_arena_close.restype = ctypes.c_int64
        self.arena = library

    def open(self, runtime: Path | str) -> None:
        """Connects to the CUDA runtime at a path, which must be the one that torch has loaded.

        Raises:
            AllocatorError: It cannot be loaded or is too old. Nothing changes.
        """
        error = self.arena.memo_arena_open(str(runtime).encode())
        if error is not None:
            raise AllocatorError(f"the CUDA runtime cannot be used: {error.decode(errors='replace')}")

    def close(self) -> int:
        """Drops the plans and frees the arena, unless blocks are in use; returns the number of such blocks."""
        return int(self.arena.memo_arena_close())

    def address_of(self, name: str) -> int:
        """Returns the address of one of the functions that torch calls."""
        return int(ctypes.cast(getattr(self.arena, name), ctypes.c_void_p).value or 0)

    def begin_step(self, device: int, plan: int | None) -> Begun:
        """Opens a step on a device; with a plan, its requests are placed by it.

        Raises:
            AllocatorError: A step is open.
        """
        begun = int(self.arena.memo_arena_begin_step(ctypes.c_int(device), ctypes.c_int64(plan or 0)))
        if begun < 0:
            raise AllocatorError("a step of the planned allocator begins inside another one")
        return Begun(begun)

    def end_step(self) -> StepSummary:
        """Closes the step and returns its summary.

        Raises:
            AllocatorError: No step is open.
        """
        summary = _Summary()
        if not self.arena.memo_arena_end_step(ctypes.byref(summary)):
            raise AllocatorError(
                "end_step() of the planned allocator without begin_step(): a step ends that never began"
            )
        raw = summary.first
        first = Divergence(**_values(raw) | {"reason": Reason(raw.reason)}) if raw.reason else None
        return StepSummary(**_values(summary) | {"first": first})

    def add_plan(
        self, sizes: Sequence[int], offsets: Sequence[int | None], streams: Sequence[int], *, arena_nbytes: int
    ) -> int:
        """Registers a plan and returns its number.

        Args:
            sizes: Bytes of each request of the step, in order; multiples of ALIGNMENT.
            offsets: Offset of each in the arena; None for requests served by the pool.
            streams: Stream handle of each.
            arena_nbytes: Size of the arena.

        Raises:
            AllocatorError: The plan breaks a rule; the message names it.
        """
        n = len(sizes)
        why = ctypes.c_char_p()
        plan = self.arena.memo_arena_add_plan(
            ctypes.c_int64(n),
            (ctypes.c_int64 * n)(*sizes),
            (ctypes.c_int64 * n)(*(-1 if offset is None else offset for offset in offsets)),
            (ctypes.c_void_p * n)(*streams),
            ctypes.c_int64(arena_nbytes),
            ctypes.byref(why),
        )
        if not plan:
            raise AllocatorError(f"the arena refuses the plan: {(why.value or b'').decode()}")
        return int(plan)

    def forget_plan(self, plan: int) -> None:
        """Drops a plan."""
        self.arena.memo_arena_forget_plan(ctypes.c_int64(plan))

    def events(self) -> tuple[StepEvent, ...]:
        """Returns the events of the current or last step; empty when there were more than the log holds."""
        n = int(self.arena.memo_arena_events(None, ctypes.c_int64(0)))
        if n <= 0:
            return ()
        events = (_Event * n)()
        n = min(n, int(self.arena.memo_arena_events(events, ctypes.c_int64(n))))
        return tuple(StepEvent(**_values(event) | {"kind": EventKind(event.kind)}) for event in events[:n])

    def counters(self, device: int) -> MemoryCounters:
        """Returns counts since the start, and bytes in use now."""
        stats = _Stats()
        self.arena.memo_arena_stats(ctypes.c_int(device), ctypes.byref(stats))
        return MemoryCounters(**_values(stats))

    def reset_peaks(self) -> None:
        """Restarts the peaks at the current values, except that of device memory in all."""
        self.arena.memo_arena_reset_peaks()
