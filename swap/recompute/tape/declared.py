"""Declarations: functions of the program that the tape has as one operator each.

memoize        its results are kept, and it never runs again: custom attention, routing, kernels torch does not see
token_local    it may run again, and computes each token's result from that token alone, or moves whole tokens between
ranks; the operators inside are not recorded
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from memo.swap.recompute.axis.token_axis import Axis
from memo.torch_private import get_current_dispatch_mode_stack

__all__ = ["AxisAfter", "TokenLocalCall", "memoize", "token_local"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

AxisAfter = Callable[..., Axis | None]
"""(axis of x, x, the function's other arguments) -> axis of the result; None where tokens mix."""


def memoize(function: _Function) -> _Function:
    """Decorator: the results of a function are kept for backward, and a replay does not call it again.

    For operations that are expensive or mix tokens (custom attention, routing of experts, scans), and for functions whose
    kernels the dispatcher does not see. Outside `memo.offload` the function runs unchanged.

        @memo.memoize
        def attend(q, k, v): ...

    Args:
        function: takes and returns tensors of any shape and dtype, also nested in lists, tuples and dicts. It
            must not write into its arguments; results may be views of them.

    Returns:
        The function with the same signature.
    """

    @functools.wraps(function)
    def memoized(*args: Any, **kwargs: Any) -> Any:
        for mode in reversed(get_current_dispatch_mode_stack()):
            handle = getattr(mode, "memoized", None)
            if handle is not None:
                return handle(function, args, kwargs)
        return function(*args, **kwargs)

    return memoized  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLocalCall:
    """One call of a token-local function."""

    function: Callable[..., torch.Tensor]
    axis_after: AxisAfter
    x: torch.Tensor
    others: tuple[Any, ...]
    """Arguments that are the same for all tokens."""

    def run(self) -> torch.Tensor:
        """Calls the function."""
        return self.function(self.x, *self.others)

    def after(self, axis: Axis) -> Axis | None:
        """Token axis of the result, `axis` being that of `x`; None where tokens mix."""
        return self.axis_after(axis, self.x, *self.others)

    def __str__(self) -> str:
        numbers = ", ".join(str(other) for other in self.others if isinstance(other, int))
        return f"{self.function.__name__}({numbers})"


def _same_axis(axis: Axis, *_: Any) -> Axis:
    return axis


@overload
def token_local(function: _Function, /) -> _Function: ...


@overload
def token_local(*, axis_after: AxisAfter) -> Callable[[_Function], _Function]: ...


def token_local(function: Callable[..., Any] | None = None, *, axis_after: AxisAfter = _same_axis) -> Any:
    """Decorator: a function may run again in a replay, also on a part of the tokens.

    For kernels that torch does not see (Triton, extensions) whose every result depends on one token alone: norms, gates,
    rotations. Without it their results are kept. Outside `memo.offload` the function runs unchanged.

        @memo.token_local
        def gate(x, scale): ...  # launches a kernel

    The layer's first call runs it twice and compares bit for bit; a declaration that this shows to be wrong is as good as
    none. That is the risk: a function that is wrong only for other numbers or lengths gives wrong gradients.

    Args:
        function: called as `function(x, *others)`, where `x` is a tensor (..., tokens, ...) and `others` are the same for
            all tokens: weights, numbers. It must not write into them, draw random numbers, or return a view of them. Its
            result is a new tensor. It may be a collective, given the same number of tokens on every rank.
        axis_after: called as `axis_after(axis, x, *others)` with the token axis of `x`; returns the token axis of the
            result, or None where tokens mix. By default tokens stay in the dimension in which they were.

    Returns:
        The function with the same signature; without `function`, a decorator.
    """
    if function is None:
        return functools.partial(token_local, axis_after=axis_after)

    @functools.wraps(function)
    def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
        for mode in reversed(get_current_dispatch_mode_stack()):
            handle = getattr(mode, "token_local", None)
            if handle is not None:
                call = TokenLocalCall(function=function, axis_after=axis_after, x=x, others=others)
                handled: torch.Tensor = handle(call)
                return handled
        result: torch.Tensor = function(x, *others)
        return result

    return run
