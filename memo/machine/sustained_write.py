"""Write rate of scratch directories over many bytes: a consumer drive's fast cache ends after some tens of GiB.

The write goes through a DiskStore, as training's does, into new scratch while the file systems have room for it, and over
the same scratch after that.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memo.errors import ScratchFull
from memo.swap import aligned_empty
from memo.swap.disk import DiskExtent, DiskStore
from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.swap.backends import Timed

_TENSOR_BYTES = 16 << 20
_OUTSTANDING = 4  # operations in flight: enough to keep every I/O thread busy
_WINDOWS = 32
_FALL = 0.8
"""The rate has fallen where the second half's is below this share of the first windows'. Two runs on an idle drive differ by
less; caches of consumer drives end in a fall to a half or less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedWrite:
    """Rates of one long write."""

    written_bytes: int
    scratch_bytes: int
    """Different bytes of the disk that were written; the rest went over them again."""
    window_bytes_per_s: list[float]
    """Rates of equal parts of the write, in order."""
    first_bytes_per_s: float
    """Rate until the fall; where there is none, that of the whole write."""
    steady_bytes_per_s: float
    """Median rate of the second half of the write."""
    fell_after_bytes: int | None
    """Bytes that were written before the rate fell; None where it did not fall."""


def measure_sustained(directories: Sequence[Path], nbytes: int) -> SustainedWrite:
    """Writes `nbytes` over `directories`, striped, as fast as they take it. This wears the drives by as much.

    Args:
        directories: Scratch directories. 1 GiB of each file system stays free.
        nbytes: Rounded up to 32 times 16 MiB.

    Raises:
        ScratchUnusable, ScratchFull, StoreWriteError: As DiskStore. Nothing is left on the disk.
    """
    per_window = -(-nbytes // (_WINDOWS * _TENSOR_BYTES))
    store = DiskStore(directories, None)
    try:
        buffers = [aligned_empty(_TENSOR_BYTES).random_(0, 256) for _ in range(_OUTSTANDING)]
        extents: list[DiskExtent] = []
        flying: collections.deque[Timed] = collections.deque()
        rates, full = [], False
        for window in range(_WINDOWS):
            began = time.perf_counter()
            for number in range(window * per_window, (window + 1) * per_window):
                if len(flying) == _OUTSTANDING:
                    flying.popleft().synchronize()
                extent = None if full else store.reserve(_TENSOR_BYTES)
                full = extent is None
                if extent is None and len(extents) < _OUTSTANDING:
                    raise ScratchFull(
                        f"no room for {_OUTSTANDING} times {format_bytes(_TENSOR_BYTES)}: {store.refusal}; free the disk"
                    )
                extents += [] if extent is None else [extent]
                flying.append(store.write(extent or extents[number % len(extents)], buffers[number % _OUTSTANDING]))
            while flying:
                flying.popleft().synchronize()
            rates.append(per_window * _TENSOR_BYTES / (time.perf_counter() - began))
        return summary(rates, window_bytes=per_window * _TENSOR_BYTES, scratch_bytes=len(extents) * _TENSOR_BYTES)
    finally:
        store.close()


def summary(rates: Sequence[float], *, window_bytes: int, scratch_bytes: int) -> SustainedWrite:
    """Finds where the rate fell: before the first window nearer to the second half's rate than to the first one's."""
    steady = statistics.median(rates[len(rates) // 2 :])
    first = statistics.median(rates[: max(1, len(rates) // 8)])
    fall = None
    if steady < _FALL * first:
        fall = next(index for index, rate in enumerate(rates) if rate * rate < first * steady) or None
    before = rates if fall is None else rates[:fall]
    return SustainedWrite(
        written_bytes=len(rates) * window_bytes,
        scratch_bytes=scratch_bytes,
        window_bytes_per_s=list(rates),
        first_bytes_per_s=statistics.harmonic_mean(before),
        steady_bytes_per_s=steady,
        fell_after_bytes=None if fall is None else fall * window_bytes,
    )
