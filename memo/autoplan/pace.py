"""Pace of settled steps: whether they have come to take longer, or less long, than they did.

A plan weighs recompute against copies, so it is out of date once the machine computes at another speed: another program
shares it, or its clock has changed. A settled step is not timed layer by layer; the time from one step's begin to the
next is, and a lasting change of it asks for a closer look. Noise does not: one step, or a few, count for nothing, and each
look makes the next one rarer.

    seconds     0.30 0.31 0.30 0.45 0.30 0.31 0.30 0.44 0.45 0.47 0.45 0.46 ...
    median      `------ of a window: 0.30 ------'                  0.45: the third in a row asks for a look
"""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 9
"""Steps whose median is compared: a minority of odd ones does not move it."""
CHANGE = 0.15
"""Relative change of the median that counts."""
MOST_PATIENCE = 512


class Pace:
    """Durations of one shape's settled steps.

    Attributes:
        patience: consecutive steps whose window must differ from the reference before `add` asks for a look. Doubled by
            each `restart`.
    """

    def __init__(self) -> None:
        self.patience = 3
        self._reference: float | None = None
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._changed = 0

    def add(self, seconds: float) -> bool:
        """Adds a step; returns True if the pace has changed for good, and a step should be measured."""
        self._last.append(seconds)
        if len(self._last) < WINDOW:
            return False
        median = statistics.median(self._last)
        if self._reference is None:
            self._reference = median
            return False
        ratio = median / self._reference if self._reference else 1.0
        self._changed = self._changed + 1 if ratio > 1 + CHANGE or ratio < 1 / (1 + CHANGE) else 0
        return self._changed >= self.patience

    def restart(self) -> None:
        """Takes the steps from now on as the reference, and is less easily alarmed than before."""
        self.patience = min(MOST_PATIENCE, 2 * self.patience)
        self._reference = None
        self._last.clear()
        self._changed = 0
