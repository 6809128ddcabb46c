"""torch.compile and functions of memo that torch calls from within compiled ones: Dynamo does not trace them."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from memo.torch_private import FrameAction, FrameExecStrategy, set_code_exec_strategy

_kept_from: set[CodeType] = set()


def keep_from_dynamo(function: Callable[..., Any]) -> None:
    """Has Dynamo not trace a function, nor what it calls, where a compiled function breaks off and runs it in Python."""
    code = getattr(function, "__code__", None)  # of a method, too
    if code is None or code in _kept_from:
        return
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    _kept_from.add(code)
