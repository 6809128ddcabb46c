"""Triton kernels of memory-bound work."""
