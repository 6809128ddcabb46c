"""Settings of tests on a GPU: matrix products that repeat themselves to the last bit, chosen before the first of them."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses deterministic algorithms without it

if os.environ.get("TORCH_CUDA_SANITIZER") == "1":
    import cuda_sanitizer

    cuda_sanitizer.correct()
