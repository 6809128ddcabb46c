"""Byteless tensors count for nothing where memory is limited, and have the shapes of real ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from memo.allocator import BytelessMode


def test_a_limit_of_the_processs_data_does_not_count_byteless_tensors() -> None:
    program = """
import resource
from memo.allocator.byteless_tensors import byteless_storage
limit = 2 << 30  # room for the program, and for a thousandth of what follows
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
held = [byteless_storage(1 << 40) for _ in range(2)]
print(sum(storage.nbytes() for storage in held))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(2 << 40)], done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("left", "right", "ends"),
    [
        ((10, 16), (3, 16, 8), [2, 3, 10]),
        ((3, 4, 16), (16, 24), [8, 8, 24]),
        ((8, 16), (16, 24), [8, 8, 16]),
        ((3, 4, 16), (3, 16, 8), None),
    ],
)
def test_grouped_products_have_the_shapes_of_real_ones(
    dtype: torch.dtype, left: tuple[int, ...], right: tuple[int, ...], ends: list[int] | None
) -> None:
    """In float32, too, which kernels take and torch's own shape function refuses."""

    def product() -> torch.Tensor:
        offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        return torch.ops.aten._grouped_mm(torch.zeros(left, dtype=dtype), torch.zeros(right, dtype=dtype), offsets)

    real = product()
    with BytelessMode():
        byteless = product()
    assert (byteless.shape, byteless.stride(), byteless.dtype) == (real.shape, real.stride(), real.dtype)
