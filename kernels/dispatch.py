"""Dispatch between the Triton kernel and the torch reference of a function."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings

import torch


def on_triton(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor is on a CUDA GPU and Triton works there."""
    return tensor.is_cuda and _works()


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes a GPU current for a launch: Triton uses the current device's stream, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _works() -> bool:
    """True if a small kernel runs. Triton needs a C compiler, which images without development tools lack."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from memo.kernels import masks_triton

        bits = masks_triton.pack(torch.ones(9, device="cuda")).tolist()
    except Exception as error:  # anything that its build or the driver raises
        reason = str(error).strip().splitlines() or [""]
        warnings.warn(
            f"triton does not work here ({type(error).__name__}: {reason[-1]}); using slower torch operators instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return bool(bits == [255, 1])
