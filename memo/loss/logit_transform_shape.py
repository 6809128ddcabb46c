"""What a model does to its logits between the matrix product and the softmax: a scale, and a soft cap.

    logits = cap * tanh(scale * raw / cap)            Gemma-2 and 3 cap; Cohere multiplies, Granite divides

Owns the formula and its slope, both written over the tensors given, since a chunk of logits is the largest thing a loss
has. Without a cap the tanh is left out; its limit for a large cap is the scaled logits.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from memo.errors import UsageError

__all__ = ["PLAIN", "LogitTransformShape"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransformShape:
    """Scaled first, then capped."""

    scale: float = 1.0
    soft_cap: float | None = None
    """No logit is larger, or smaller than its negative."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise UsageError(f"scale: {self.scale!r} is no finite number")
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0):
            raise UsageError(f"soft_cap: {self.soft_cap!r} caps nothing; it is a finite number above 0")

    def over(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits, the tanh behind a cap, which the slope needs); one of them is `raw`."""
        if self.soft_cap is None:
            return raw if self.scale == 1.0 else raw.mul_(self.scale), None
        bent = raw.mul_(self.scale / self.soft_cap).tanh_()
        return bent * self.soft_cap, bent

    def slope_over(self, slope: torch.Tensor, bent: torch.Tensor | None) -> torch.Tensor:
        """d loss / d raw, over `slope`, d loss / d logits, and `bent`."""
        if bent is not None:
            slope.mul_(bent.square_().neg_().add_(1))
        return slope if self.scale == 1.0 else slope.mul_(self.scale)


PLAIN = LogitTransformShape()
