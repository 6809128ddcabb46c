"""Which of its two forms a function of this package runs, and on which device."""

from __future__ import annotations

import contextlib
import functools
import importlib.util

import torch

__all__ = ["current", "on_triton"]


def on_triton(tensor: torch.Tensor) -> bool:
    """True when work on this tensor goes to Triton: it lies on a CUDA GPU, and triton can be imported."""
    return tensor.is_cuda and _installed()


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes a GPU the current one for a launch: Triton takes the current device's stream, whatever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
