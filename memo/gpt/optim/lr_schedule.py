"""Learning-rate schedule: linear warmup, then cosine decay to a floor."""

from __future__ import annotations

import dataclasses
import math

from memo.errors import UsageError

__all__ = ["LrSchedule"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """Learning rate as a pure function of the step number; a resumed run needs no scheduler state.

    Raises:
        UsageError: a number is out of range.
    """

    peak: float
    """Learning rate at the end of the warmup."""
    floor: float
    """Learning rate at the last step."""
    warmup: int
    """Steps from almost zero to `peak`; 0 starts at `peak`."""
    steps: int
    """Length of the whole run."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps} is less than 1")
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise UsageError(f"--lr {self.peak} is not a positive number")
        if not 0 <= self.floor <= self.peak:
            raise UsageError(f"--min-lr {self.floor} is not between 0 and --lr {self.peak}")
        if self.warmup < 0:
            raise UsageError(f"--warmup {self.warmup} is negative; 0 is no warmup")

    def at(self, step: int) -> float:
        """Learning rate of step `step`, counted from 1."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        fraction = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * fraction))
