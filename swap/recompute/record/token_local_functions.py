"""Token-local functions: functions that a token-wise layer treats as one operator, with a declared effect on the token axis.

For work that no operator rule can follow: collectives, work in tiles. The declaration says where the token axis is
after the call; the operators inside (buffers, a backend's own copies) are not followed. A recompute runs the function
again on its own tokens, unless its result is kept in place of a product's or nothing reads it
(memo.swap.recompute.record.keep_or_repeat). The results of `memoize`d functions, in contrast, are always kept.

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

__all__ = ["AxisAfter", "TokenLocalCall", "token_local"]

AxisAfter = Callable[..., Axis | None]
"""(axis of x, x, the function's other arguments) -> axis of the result; None where tokens mix."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLocalCall:
    """One call of a token-local function."""

    function: Callable[..., torch.Tensor]
    axis_after: AxisAfter
    x: torch.Tensor
    others: tuple[Any, ...]
    """The same for all tokens."""

    def run(self) -> torch.Tensor:
        """Calls the function."""
        return self.function(self.x, *self.others)

    def after(self, axis: Axis) -> Axis | None:
        """Token axis of the result, `axis` being that of `x`; None where tokens mix."""
        return self.axis_after(axis, self.x, *self.others)

    def __str__(self) -> str:
        numbers = ", ".join(str(other) for other in self.others if isinstance(other, int))
        return f"{self.function.__name__}({numbers})"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def token_local(axis_after: AxisAfter) -> Callable[[_Function], _Function]:
    """Declares that a function computes each token's result from that token alone, or moves whole tokens between ranks.

    The decorated function is called as `function(x, *others)` and returns a new tensor. Outside `memo.offload` it runs
    unchanged. A collective must be given the same number of tokens on every rank.

    Args:
        axis_after: called as `axis_after(axis, x, *others)` with the token axis of `x`; returns the token axis of the
            result, or None where tokens mix, after which the layer moves whole.

    Returns:
        A decorator for functions of which only the first argument runs over the tokens.
    """

    def mark(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
            for mode in reversed(_get_current_dispatch_mode_stack()):
                handle = getattr(mode, "token_local", None)
                if handle is not None:
                    handled: torch.Tensor = handle(
                        TokenLocalCall(function=function, axis_after=axis_after, x=x, others=others)
                    )
                    return handled
            result: torch.Tensor = function(x, *others)
            return result

        return run  # type: ignore[return-value]

    return mark
