"""Rates of kernels on a GPU, or over the emulated device, where sizes are small and the numbers say nothing."""

from __future__ import annotations

import pytest
import torch

from memo.machine import measure_kernels

pytestmark = pytest.mark.gpu


def test_each_kernel_is_measured() -> None:
    rates = measure_kernels(torch.device("cuda", 0), seconds=0.05, small=True)
    assert rates.product_flops_per_s > 0
    assert rates.copy_bytes_per_s > 0
    assert 0 < rates.launch_s < 1
    assert len(rates.attention) == 6
    assert all(one.forward_flops_per_s > 0 and one.backward_flops_per_s > 0 for one in rates.attention)
