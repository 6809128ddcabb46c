"""Rates of kernels by GPU, fitted on published runs by `python -m benchmarks.published --fit`. Not to be edited."""

from __future__ import annotations

from memo.gpt.arithmetic.kernel_times import KernelRates

__all__ = ["FITTED"]

FITTED: dict[str, KernelRates] = {
    "a100": KernelRates(
        matmul_efficiency=0.6985,
        half_size=57.06,
        attention_efficiency=0.2977,
        memory_share=0.732,
        fp8_gain=1.394,
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
