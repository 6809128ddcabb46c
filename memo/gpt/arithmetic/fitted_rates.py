"""Rates of kernels by GPU, fitted on published runs: `python -m benchmarks.published --fit` writes this file."""

from __future__ import annotations

from memo.gpt.arithmetic.kernel_times import KernelRates

__all__ = ["FITTED"]

FITTED: dict[str, KernelRates] = {
    "a100": KernelRates(
        matmul_efficiency=0.7032,
        half_size=67.37,
        attention_efficiency=0.3011,
        memory_share=0.6752,
        fp8_gain=1.4,
    ),
    "h100": KernelRates(
        matmul_efficiency=0.6123,
        half_size=329.1,
        attention_efficiency=0.1836,
        memory_share=0.9374,
        fp8_gain=1.124,
    ),
    "h100-96g": KernelRates(
        matmul_efficiency=0.5803,
        half_size=400.6,
        attention_efficiency=0.1837,
        memory_share=0.9482,
        fp8_gain=1.744,
    ),
}
"""By kind of GPU; a100 is both of 40 and of 80 GB, h100-96g the one with HBM2e at 500 W."""
