"""torch's CUDA stream sanitizer without two of its mistakes; TORCH_CUDA_SANITIZER=1 turns it on.

It takes `set_`, which makes a view, for a kernel that writes; and a tensor without memory for one at the address of its
Python object, so that two of them which follow each other there seem to race.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.cuda import _sanitizer

__all__ = ["correct"]


def correct() -> None:
    """From now on neither is reported."""
    handle = _sanitizer.ArgumentHandler._handle_argument

    def of_memory(self: Any, value: Any, is_write: bool, *args: Any, **named: Any) -> None:
        if not (isinstance(value, torch.Tensor) and value.is_cuda and value.data_ptr() == 0):
            handle(self, value, is_write, *args, **named)

    dispatch = _sanitizer.CUDASanitizerDispatchMode.__torch_dispatch__

    def but_views(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.set_.source_Storage_storage_offset:
            return func(*args, **(kwargs or {}))
        return dispatch(self, func, types, args, kwargs)

    _sanitizer.ArgumentHandler._handle_argument = of_memory
    _sanitizer.CUDASanitizerDispatchMode.__torch_dispatch__ = but_views
