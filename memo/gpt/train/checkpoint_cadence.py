"""Checkpoint interval: after a number of steps, after a number of minutes, or whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Callable


class CheckpointCadence:
    """Decides when a checkpoint is due. It stays due until `begun` is called, so a delayed checkpoint is not lost.

    Args:
        steps: steps between checkpoints; 0 is never.
        minutes: minutes between checkpoints; 0 is never.
        done: steps done before this run.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self, *, steps: int, minutes: float, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps = steps
        self._seconds = 60 * minutes
        self._clock = clock
        self.begun(done)

    def due(self, step: int) -> bool:
        """True if a checkpoint is due after step `step`."""
        by_steps = self._steps > 0 and step // self._steps > self._last_step // self._steps
        by_time = self._seconds > 0 and self._clock() - self._last_s >= self._seconds
        return by_steps or by_time

    def begun(self, step: int) -> None:
        """Restarts both intervals; to be called when the checkpoint of `step` begins."""
        self._last_step, self._last_s = step, self._clock()
