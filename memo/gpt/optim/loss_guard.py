"""Guard against diverging training: detects non-finite losses and loss spikes, and decides whether to skip or stop.

Owns the window of recent losses and the policy. Does not own the update: the trainer asks before each update, so a skipped
or stopped step leaves the weights of the step before.

    not finite   the loss or the gradient norm is NaN or infinite; the update is never made
    spike        the loss is above  median + max(8 sigma, a tenth of the median)  of the recent losses

sigma is 1.4826 times the median absolute deviation: the standard deviation of a normal distribution, robust to outliers. No
loss is a spike before `warmup` losses are known, since the first losses fall steeply.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import statistics
from typing import Any

from memo.errors import TrainingDiverged, UsageError

SIGMA_OF_MAD = 1.4826
SMALLEST_RISE = 0.1
"""Smallest rise that is a spike, as a fraction of the median; losses that hardly vary have tiny deviations."""
MAX_SKIPS_IN_A_ROW = 10
"""Skipped steps in a row after which training stops."""


class OnNan(enum.StrEnum):
    """Policy for a step whose loss or gradient norm is not finite."""

    STOP = "stop"
    SKIP = "skip"


class OnSpike(enum.StrEnum):
    """Policy for a step whose loss is a spike; most runs recover from one by themselves."""

    WARN = "warn"
    SKIP = "skip"
    STOP = "stop"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossGuardConfig:
    """Policy of a LossGuard and its definition of a spike.

    Raises:
        UsageError: a number is out of range.
    """

    on_nan: OnNan = OnNan.STOP
    """When a loss or gradient is not finite: save the previous step and stop, or skip the update."""
    on_spike: OnSpike = OnSpike.WARN
    """When the loss jumps: print a warning, skip the update, or stop."""
    window: int = 128
    """Number of recent losses that a loss is compared with."""
    warmup: int = 32
    """Number of losses seen before any is a spike."""
    deviations: float = 8.0
    """Robust standard deviations above the median at which a loss is a spike."""

    def __post_init__(self) -> None:
        if not 2 <= self.warmup <= self.window:
            raise UsageError(f"loss guard: warmup {self.warmup} is not between 2 and the window {self.window}")
        if not self.deviations > 0:
            raise UsageError(f"loss guard: {self.deviations} deviations is not a positive number")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Decision about a step that is not stopped."""

    alarm: str | None = None
    """Reason why the step is not normal."""
    skip: bool = False
    """Skip the update and keep the weights."""


class LossGuard:
    """Judges each step. Its state is a function of the losses it has seen, so a resumed run decides the same."""

    def __init__(self, config: LossGuardConfig) -> None:
        self.config = config
        self.skipped = 0
        """Steps of the whole run whose update was skipped."""
        self._in_a_row = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=config.window)

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """Judges one step; to be called once per step, before its update.

        Raises:
            TrainingDiverged: the policy is to stop, or too many steps in a row were skipped.
        """
        alarm, advice = _not_finite(loss, grad_norm), "use a lower --lr, a longer --warmup, or --precision fp32"
        skip, stop = alarm is not None, alarm is not None and self.config.on_nan is OnNan.STOP
        if alarm is None:
            alarm, advice = self._spike(loss), "use a lower --lr, or --on-spike warn or skip"
            self._losses.append(loss)
            skip = alarm is not None and self.config.on_spike is OnSpike.SKIP
            stop = alarm is not None and self.config.on_spike is OnSpike.STOP
        if stop:
            raise _diverged(step, f"{alarm}", advice)
        self._in_a_row = self._in_a_row + 1 if skip else 0
        if self._in_a_row > MAX_SKIPS_IN_A_ROW:
            raise _diverged(step, f"{alarm}, and the {MAX_SKIPS_IN_A_ROW} steps before it were skipped, too", advice)
        self.skipped += skip
        return Verdict(alarm=alarm, skip=skip)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON values; floats survive exactly."""
        return {"losses": list(self._losses), "skipped": self.skipped, "in_a_row": self._in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the result of `state`; an empty dict, as older checkpoints have, is a guard without a past."""
        self._losses = collections.deque(state.get("losses", ()), maxlen=self.config.window)
        self.skipped, self._in_a_row = state.get("skipped", 0), state.get("in_a_row", 0)

    def _spike(self, loss: float) -> str | None:
        if len(self._losses) < self.config.warmup:
            return None
        median = statistics.median(self._losses)
        deviation = SIGMA_OF_MAD * statistics.median(abs(known - median) for known in self._losses)
        limit = median + max(self.config.deviations * deviation, SMALLEST_RISE * abs(median))
        if loss <= limit:
            return None
        return (
            f"the loss is {loss:.4f}, a spike: the last {len(self._losses)} had a median of {median:.4f} "
            f"and {limit:.4f} is the limit"
        )


def _not_finite(loss: float, grad_norm: float) -> str | None:
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
    return None


def _diverged(step: int, alarm: str, advice: str) -> TrainingDiverged:
    return TrainingDiverged(f"step {step}: {alarm}; the weights of step {step - 1} are unchanged; {advice}")
