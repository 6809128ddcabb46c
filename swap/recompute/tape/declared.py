"""Declarations: functions of the program that the tape has as one operator each; the operators inside are not recorded.

memoize        its results are kept, and it never runs again: custom attention, routing, kernels torch does not see
recomputable   it may run again
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from memo.torch_private import get_current_dispatch_mode_stack

_Function = TypeVar("_Function", bound=Callable[..., Any])


def memoize(function: _Function) -> _Function:
    """Decorator: the results of a function are kept for backward, and a replay does not call it again.

    For operations that are expensive (custom attention, routing of experts, scans), and for functions whose kernels the
    dispatcher does not see. Outside `memo.offload` the function runs unchanged.

        @memo.memoize
        def attend(q, k, v): ...

    Args:
        function: takes and returns tensors of any shape and dtype, also nested in lists, tuples and dicts. It
            must not write into its arguments; results may be views of them.

    Returns:
        The function with the same signature.
    """
    return _declared(function, "memoized")


def recomputable(function: _Function) -> _Function:
    """Decorator: a function may run again in a replay.

    For cheap kernels that torch does not see (Triton, extensions): norms, gates, rotations. Without it their results are
    kept. Outside `memo.offload` the function runs unchanged.

        @memo.recomputable
        def gate(x, scale): ...  # launches a kernel

    The layer's first call runs it twice and compares bit for bit; a declaration that this shows to be wrong is as good as
    none. That is the risk: a function that is wrong only for other numbers or lengths gives wrong gradients.

    Args:
        function: takes tensors of any shape and dtype, and returns one, or a list or tuple. It must not write into its
            arguments, draw random numbers, or return a view of them. It may be a collective. Other tensors that it reads
            (of its closure, and parameters and buffers of modules there or among its arguments, as `self`) must not
            change before backward, which raises ModifiedAfterSave; a change of a global or of an attribute goes unseen.

    Returns:
        The function with the same signature.
    """
    return _declared(function, "recomputable")


def _declared(function: _Function, method: str) -> _Function:
    """A function that a recorder, where there is one, runs by this method."""

    @functools.wraps(function)
    def declared(*args: Any, **kwargs: Any) -> Any:
        for mode in reversed(get_current_dispatch_mode_stack()):
            handle = getattr(mode, method, None)
            if handle is not None:
                return handle(function, args, kwargs)
        return function(*args, **kwargs)

    return declared  # type: ignore[return-value]
