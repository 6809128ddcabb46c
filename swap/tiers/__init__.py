"""Where moved bytes rest: device memory, host memory, disk."""
