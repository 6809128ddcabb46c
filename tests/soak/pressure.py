"""Memory pressure for some steps: a limit on the process's own cgroup, and page cache that fills all that is below it.

The limit is what memo may take by its budget and `SLACK` for what the budget does not count. So each allocation of a step
waits for the kernel to reclaim a page, and a run that takes more than its budget is killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.soak.memory_group import MemoryGroup

SLACK = 32 << 20
_CACHED_BYTES = 96 << 20
"""Of a file that is read before each step: more than the limit leaves."""


class Pressure:
    """Pressure on one group, begun and ended.

    Args:
        group: of this process.
        folder: for the file that is read; on a disk, since a tmpfs is not reclaimed.
        room: bytes that memo may still take by its budget.
    """

    def __init__(self, group: MemoryGroup, folder: Path, room: Callable[[], int]) -> None:
        self._group, self._room = group, room
        self._file = folder / "pressure"
        self._before = 0

    def begin(self) -> None:
        """Lowers the limit."""
        with self._file.open("wb") as file:
            for _ in range(_CACHED_BYTES >> 20):
                file.write(b"\1" * (1 << 20))
            os.fsync(file.fileno())
        self._before = self._group.times_at_limit()
        self._group.limit(self._group.held_bytes() + max(0, self._room()) + SLACK)
        self.press()

    def press(self) -> None:
        """Fills what is left with page cache."""
        with self._file.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass

    def end(self) -> bool:
        """Lifts the limit; returns whether an allocation has met it."""
        self._group.unlimit()
        self._file.unlink()
        return self._group.times_at_limit() > self._before
