"""Settings of tests on a GPU: matrix products that repeat themselves to the last bit, chosen before the first of them."""

from __future__ import annotations

import gc
import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses deterministic algorithms without it

if os.environ.get("TORCH_CUDA_SANITIZER") == "1":
    import cuda_sanitizer

    cuda_sanitizer.correct()


@pytest.fixture(autouse=True)
def _fresh_device() -> None:
    """Gives back what an earlier test of this process left: cuBLAS keeps a workspace for every thread and stream."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
