"""Recorded element-wise functions that a model applies to its logits on the way to its loss.

They are either applied to the logits, once those are computed after all, or reduced to the formula that
memo.loss.logit_transform_shape computes: cap * tanh(scale * (x + bias) / cap).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from memo.loss.logit_transform_shape import LogitTransformShape

DIVISIONS = frozenset({"div", "divide", "true_divide"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Element-wise functions in the order of their calls, each with its arguments after the logits."""

    functions: tuple[tuple[Callable[..., Tensor], tuple[Any, ...]], ...] = ()

    def then(self, function: Callable[..., Tensor], *arguments: Any) -> Steps:
        """These functions and one more."""
        return Steps(functions=(*self.functions, (function, arguments)))

    def of(self, logits: Tensor) -> Tensor:
        """Applies the functions to `logits`, in their order."""
        for function, arguments in self.functions:
            logits = function(logits, *arguments)
        return logits

    @property
    def formula(self) -> tuple[Tensor | None, LogitTransformShape] | None:
        """(bias added first, scale and soft cap); None where the functions are not of that form."""
        bias: Tensor | None = None
        before, after, capped = 1.0, 1.0, False
        for function, arguments in self.functions:
            name = function.__name__
            if name == "add":
                bias = arguments[0].flatten()
            elif name == "tanh" and capped:
                return None
            elif name == "tanh":
                capped = True
            elif name != "to":
                factor = 1.0 / arguments[0] if name in DIVISIONS else float(arguments[0])
                before, after = (before, after * factor) if capped else (before * factor, after)
        if not capped:
            return bias, LogitTransformShape(scale=before)
        return (bias, LogitTransformShape(scale=before * after, soft_cap=after)) if after > 0 else None
