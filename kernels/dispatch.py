"""Which of its two forms a function of this package runs."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["on_triton"]


def on_triton(tensor: torch.Tensor) -> bool:
    """True when work on this tensor goes to Triton: it lies on a CUDA GPU, and triton can be imported."""
    return tensor.is_cuda and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
