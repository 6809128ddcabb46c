"""Device on which kernels run in these tests: a GPU, or Triton's interpreter when TRITON_INTERPRET=1.

Tests of kernels are marked `gpu`; test_interpreted.py runs the same ones without a GPU, in a process of its own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device on which Triton works here."""
    if INTERPRETED:
        _round_as_gpus_do(monkeypatch)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU; test_interpreted.py runs this test in Triton's interpreter")
    return torch.device("cuda")


def _round_as_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of triton 3.7 cuts float32 off where bfloat16 ends; a GPU rounds to nearest even (cvt.rn.bf16)."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        values = torch.tensor(data).to(torch.bfloat16)  # a copy: the interpreter's arrays may be read-only
        return values.view(torch.int16).numpy().view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
