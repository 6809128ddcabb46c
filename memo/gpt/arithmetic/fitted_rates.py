"""Rates of kernels by GPU, fitted on published runs: `python -m benchmarks.published --fit` writes this file."""

from __future__ import annotations

from memo.gpt.arithmetic.kernel_times import KernelRates

__all__ = ["FITTED"]

FITTED: dict[str, KernelRates] = {
    "a100": KernelRates(
        matmul_efficiency=0.7041,
        half_size=68.48,
        attention_efficiency=0.3001,
        memory_share=0.6708,
        fp8_gain=1.394,
    ),
    "h100": KernelRates(
        matmul_efficiency=0.6088,
        half_size=313.2,
        attention_efficiency=0.1835,
        memory_share=0.9156,
        fp8_gain=1.126,
    ),
    "h100-96g": KernelRates(
        matmul_efficiency=0.5796,
        half_size=392.4,
        attention_efficiency=0.1837,
        memory_share=0.9377,
        fp8_gain=1.751,
    ),
}
"""By kind of GPU; a100 is both of 40 and of 80 GB, h100-96g the one with HBM2e at 500 W."""
