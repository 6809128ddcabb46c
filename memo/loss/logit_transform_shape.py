"""Logit transform of a model, between matrix product and softmax: a scale and a soft cap.

    logits = cap * tanh(scale * raw / cap)            Gemma-2 and 3 cap; Cohere multiplies, Granite divides

Owns the formula and its gradient. Both overwrite their arguments, since a chunk of logits is the largest tensor of the
loss. Without a cap the tanh is left out; its limit for a large cap is the scaled logits.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from memo.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransformShape:
    """Scale and soft cap; the scale comes first.

    Raises:
        UsageError: `scale` is not finite, or `soft_cap` is not finite and above zero.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    """Bound of the logits' absolute value; None: no cap."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise UsageError(f"scale: {self.scale!r} is not a finite number")
        if self.soft_cap is not None and not (math.isfinite(self.soft_cap) and self.soft_cap > 0):
            raise UsageError(f"soft_cap: {self.soft_cap!r} is not a finite number above 0")

    def over(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits, tanh that the gradient needs or None), from `raw` logits of any shape; one of them overwrites `raw`."""
        if self.soft_cap is None:
            return raw if self.scale == 1.0 else raw.mul_(self.scale), None
        tanh = raw.mul_(self.scale / self.soft_cap).tanh_()
        return tanh * self.soft_cap, tanh

    def gradient_over(self, grad: torch.Tensor, tanh: torch.Tensor | None) -> torch.Tensor:
        """Gradient of the loss by the raw logits, from `grad`, that by the logits; overwrites both arguments."""
        if tanh is not None:
            grad.mul_(tanh.square_().neg_().add_(1))
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


PLAIN = LogitTransformShape()
