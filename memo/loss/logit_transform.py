"""What a model does to each of its logits on the way to its loss, noted instead of done.

Owns the two readings of such notes: the same operations, done to logits that were made after all; and the formula they
come to, where it is one that the loss without logits knows (memo.loss.logit_transform_shape), cap * tanh(scale * (x +
bias) / cap).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from memo.loss.logit_transform_shape import LogitTransformShape

__all__ = ["DIVISIONS", "Steps"]

DIVISIONS = frozenset({"div", "divide", "true_divide"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Functions, and what each takes after the logits. All of them are element by element."""

    done: tuple[tuple[Callable[..., Tensor], tuple[Any, ...]], ...] = ()

    def then(self, function: Callable[..., Tensor], *arguments: Any) -> Steps:
        return Steps(done=(*self.done, (function, arguments)))

    def of(self, logits: Tensor) -> Tensor:
        """Done, in the model's own way and order."""
        for function, arguments in self.done:
            logits = function(logits, *arguments)
        return logits

    @property
    def formula(self) -> tuple[Tensor | None, LogitTransformShape] | None:
        """The bias that was added first, and scale and cap; None if it is another formula."""
        bias: Tensor | None = None
        before, behind, bent = 1.0, 1.0, False
        for function, arguments in self.done:
            name = function.__name__
            if name == "add":
                bias = arguments[0].flatten()
            elif name == "tanh" and bent:
                return None
            elif name == "tanh":
                bent = True
            elif name != "to":
                factor = 1.0 / arguments[0] if name in DIVISIONS else float(arguments[0])
                before, behind = (before, behind * factor) if bent else (before * factor, behind)
        if not bent:
            return bias, LogitTransformShape(scale=before)
        return (bias, LogitTransformShape(scale=before * behind, soft_cap=behind)) if behind > 0 else None
