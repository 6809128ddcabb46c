"""When a checkpoint is due: every so many steps, every so many minutes, or whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["CheckpointCadence"]


class CheckpointCadence:
    """Remains due until it is told that one was begun, so that a checkpoint that has to wait is not lost."""

    def __init__(
        self, *, steps: int, minutes: float, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """0 steps, or 0 minutes, is never. `done` steps were made before this run."""
        self._steps = steps
        self._seconds = 60 * minutes
        self._clock = clock
        self.begun(done)

    def due(self, step: int) -> bool:
        """After step `step`."""
        by_steps = self._steps > 0 and step // self._steps > self._last_step // self._steps
        by_time = self._seconds > 0 and self._clock() - self._last_s >= self._seconds
        return by_steps or by_time

    def begun(self, step: int) -> None:
        """The checkpoint of `step` is on its way."""
        self._last_step, self._last_s = step, self._clock()
