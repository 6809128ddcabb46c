"""torch.compile and functions of memo that torch calls from within compiled ones: Dynamo does not trace them."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

__all__ = ["keep_from_dynamo"]

_kept_from: set[CodeType] = set()


def keep_from_dynamo(function: Callable[..., Any]) -> None:
    """Has Dynamo not trace a function, nor what it calls, where a compiled function breaks off and runs it in Python."""
    code = getattr(function, "__code__", None)  # of a method, too
    if code is None or code in _kept_from:
        return
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))
    _kept_from.add(code)
