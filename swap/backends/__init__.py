"""Streams, events and copies of one kind of device: CUDA, or the CPU."""
