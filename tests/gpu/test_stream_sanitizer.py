"""torch's own CUDA stream sanitizer sees no unordered access in the engine's copies."""

from __future__ import annotations

import pytest
from cuda_sanitizer import assert_clean

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch
from small_models import ids, stack
import memo
model = stack().cuda()
manager = memo.offload(model, alpha=1.0, host="256MiB", min_bytes=512)
for step in range(3):
    with manager:
        loss = model(ids(step).cuda())
    loss.backward()
    model.zero_grad()
torch.cuda.synchronize()
assert manager.stats.bytes_host > 0
print("clean")
"""


def test_the_cuda_sanitizer_is_clean_on_a_small_model() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    assert_clean("-c", PROGRAM)
