"""Times of kernels by their sizes."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.published.kernel_times import KernelRates, KernelTimes
from memo.mip.inputs import hardware_preset

A100 = hardware_preset("a100-80g")
TIMES = KernelTimes(A100, KernelRates(matmul_efficiency=0.8, half_size=100, attention_efficiency=0.5, memory_share=0.5))


def test_a_dimension_of_the_half_size_halves_a_products_rate() -> None:
    large = 1 << 40
    fast_memory = dataclasses.replace(A100, hbm_bytes_per_s=1e30)
    times = KernelTimes(fast_memory, TIMES.rates)
    assert times.product_s(large, large, 100) == pytest.approx(2 * 2.0 * large**2 * 100 / (312e12 * 0.8), rel=1e-6)
    assert times.product_s(100, large, large) == pytest.approx(times.product_s(large, large, 100), rel=1e-6)


def test_a_thin_product_takes_the_time_of_its_bytes() -> None:
    times = KernelTimes(A100, KernelRates(matmul_efficiency=0.8, attention_efficiency=0.5, memory_share=0.5))
    nbytes = 2 * (4096 * 4096 + 2 * 4096)
    assert times.product_s(1, 4096, 4096) == pytest.approx(nbytes / (A100.hbm_bytes_per_s * 0.5))


def test_backward_of_a_linear_layer_is_two_products() -> None:
    forward, backward = TIMES.three_products_s(8192, 4096, 4096)
    assert backward == pytest.approx(2 * forward, rel=0.01)


def test_attention_and_passes_have_rates_of_their_own() -> None:
    assert TIMES.attention_s(312e12) == pytest.approx(2.0)
    assert TIMES.passes_s(A100.hbm_bytes_per_s) == pytest.approx(2.0)
