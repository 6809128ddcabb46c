"""torch's CUDA stream sanitizer without two of its mistakes; TORCH_CUDA_SANITIZER=1 turns it on.

It takes `set_`, which makes a view, for a kernel that writes; and a tensor without memory for one at the address of its
Python object, so that two of them which follow each other there seem to race.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]


def assert_clean(*arguments: str) -> None:
    """Runs Python with these arguments under the sanitizer: the program prints "clean", and nothing is reported."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": str(SUPPORT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "clean" in done.stdout
    assert "CSAN" not in done.stderr, done.stderr


def correct() -> None:
    """From now on neither is reported."""
    from torch.cuda import _sanitizer  # which begins to trace as it is imported

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
