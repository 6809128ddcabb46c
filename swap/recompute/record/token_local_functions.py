"""Marks a function that a token-wise layer takes as one operator: what it does with each token, as a whole, is known.

For what no operator's rule could tell: what ranks do together, work in tiles. The mark says where the token axis is after
the call; what happens in between (buffers, a backend's own copies) is nobody's business. A recompute runs the function again
with the tokens it wants, unless its result is kept in place of a product's or nobody reads it
(memo.swap.recompute.record.keep_or_repeat); the results of `memoize`d functions are always kept.

    tokens of a rank          0 .. s/tp                     Axis(outer=1)
    gathered from tp ranks    0 .. s/tp | 0 .. s/tp | ...   Axis(outer=tp): a kept range is a prefix of every rank's
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memo.swap.recompute.axis.token_axis import Axis

__all__ = ["AxisAfter", "Marked", "marked"]

AxisAfter = Callable[..., Axis | None]
"""(axis of x, x, the function's other arguments) -> axis of the result; None where tokens mix."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """One call of a marked function."""

    function: Callable[..., torch.Tensor]
    axis_after: AxisAfter
    x: torch.Tensor
    others: tuple[Any, ...]
    """The same for all tokens."""

    def run(self) -> torch.Tensor:
        return self.function(self.x, *self.others)

    def after(self, axis: Axis) -> Axis | None:
        return self.axis_after(axis, self.x, *self.others)

    def __str__(self) -> str:
        numbers = ", ".join(str(other) for other in self.others if isinstance(other, int))
        return f"{self.function.__name__}({numbers})"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def marked(axis_after: AxisAfter) -> Callable[[_Function], _Function]:
    """Marks function(x, *others), of whose arguments x alone runs over the tokens. Its result must be a new tensor.

    What ranks do together must be given as many tokens on each. Outside memo.offload it runs as it is.
    """

    def mark(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
            for mode in reversed(_get_current_dispatch_mode_stack()):
                take = getattr(mode, "marked", None)
                if take is not None:
                    taken: torch.Tensor = take(Marked(function=function, axis_after=axis_after, x=x, others=others))
                    return taken
            own: torch.Tensor = function(x, *others)
            return own

        return run  # type: ignore[return-value]

    return mark
