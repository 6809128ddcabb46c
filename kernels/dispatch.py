"""Which of its two forms a function of this package runs, and on which device."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings

import torch

__all__ = ["current", "on_triton"]


def on_triton(tensor: torch.Tensor) -> bool:
    """True when work on this tensor goes to Triton: it lies on a CUDA GPU, and triton works here."""
    return tensor.is_cuda and _works()


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes a GPU the current one for a launch: Triton takes the current device's stream, whatever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _works() -> bool:
    """Tried once, on a small kernel: triton calls a C compiler, which an image without development tools lacks."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from memo.kernels import masks_triton

        bits = masks_triton.pack(torch.ones(9, device="cuda")).tolist()
    except Exception as error:  # whatever its build or its driver raises
        reason = str(error).strip().splitlines() or [""]
        warnings.warn(
            f"triton does not work here ({type(error).__name__}: {reason[-1]}); torch does the same, slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return bool(bits == [255, 1])
