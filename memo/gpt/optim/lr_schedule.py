"""Learning-rate schedule: linear warmup, then cosine decay to a floor."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

from memo.errors import UsageError

_RATE = {"metavar": "RATE"}


FLAGS = {"peak": "--lr", "floor": "--min-lr"}
"""Flags of the fields of LrSchedule whose flag is not their name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """Learning rate as a pure function of the step number; a resumed run needs no scheduler state.

    Raises:
        UsageError: a number is out of range.
    """

    peak: Annotated[float, _RATE]
    """Learning rate at the end of the warmup (default 3e-4)."""
    floor: Annotated[float, _RATE]
    """Learning rate at the last step (default: a tenth of --lr)."""
    warmup: Annotated[int, {"metavar": "STEPS"}]
    """Steps of linear warmup from almost zero to the peak; 0 starts there (default: a tenth of --steps, at least 50 and at
    most 2000; a shorter run ends within it)."""
    steps: int
    """Steps of the whole run, resumed ones included (default 100)."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps} is less than 1")
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise UsageError(f"--lr {self.peak} is not a positive number")
        if not 0 <= self.floor <= self.peak:
            raise UsageError(f"--min-lr {self.floor} is not between 0 and --lr {self.peak}")
        if self.warmup < 0:
            raise UsageError(f"--warmup {self.warmup} is negative; 0 is no warmup")

    @classmethod
    def of(
        cls, *, peak: float = 3e-4, floor: float | None = None, warmup: int | None = None, steps: int = 100
    ) -> LrSchedule:
        """A schedule of which only some numbers are given; None is the default that follows from the others."""
        return cls(
            peak=peak,
            floor=peak / 10 if floor is None else floor,
            warmup=min(2000, max(50, steps // 10)) if warmup is None else warmup,
            steps=steps,
        )

    def at(self, step: int) -> float:
        """Learning rate of step `step`, counted from 1."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        fraction = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * fraction))
