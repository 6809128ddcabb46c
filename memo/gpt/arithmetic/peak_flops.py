"""Peak FLOPs per second of GPUs by name: dense bfloat16 on tensor cores, from the data sheets."""

from __future__ import annotations

__all__ = ["peak_flops"]

# First match wins, so a longer name comes before a shorter one that it contains.
_BF16_DENSE = (
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak in FLOPs per second of the device with torch's name for it; None when it is not known."""
    return next((flops for name, flops in _BF16_DENSE if name in device_name), None)
