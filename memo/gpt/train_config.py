"""Configuration of the training step: optimizer, schedule, accumulation, precision. Needs no torch."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Annotated

from memo.errors import UsageError
from memo.gpt.optim.loss_guard import LossGuardConfig
from memo.gpt.optim.lr_schedule import LrSchedule


class Precision(enum.StrEnum):
    """Number format of weights and arithmetic."""

    FP32 = "fp32"
    BF16_AUTOCAST = "bf16-autocast"  # weights in float32, matrix products in bfloat16
    BF16 = "bf16"  # everything in bfloat16, the optimizer's state too


GPU_PRECISION = Precision.BF16_AUTOCAST
"""Default on a GPU, of training and of plans."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Numbers of the step loop. Model, data and outputs are in RunConfig.

    Raises:
        UsageError: a number is out of range.
    """

    schedule: LrSchedule
    accumulate: int = 1
    """Microbatches in a step; their gradients are averaged."""
    weight_decay: Annotated[float, {"metavar": "RATE"}] = 0.1
    """Weight decay of matrices, by AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    clip: Annotated[float | None, {"metavar": "NORM"}] = 1.0
    """Clip the norm of all gradients together to NORM; None is off, and 0 on the command line."""
    precision: Precision = Precision.FP32
    eval_steps: int = 8
    """Batches in an evaluation."""
    loss_guard: LossGuardConfig = dataclasses.field(default_factory=LossGuardConfig)

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise UsageError(f"--accumulate {self.accumulate} is less than 1")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise UsageError(f"--weight-decay {self.weight_decay} is not zero or a positive number")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"--clip {self.clip} is not a positive number; 0 is no clipping")
        if self.eval_steps < 1:
            raise UsageError(f"--eval-steps {self.eval_steps} is less than 1")
