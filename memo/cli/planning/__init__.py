"""What `memo plan` does with plans of many requests: searches for a length and for GPUs, and sweeps."""
