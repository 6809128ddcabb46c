"""Records the allocations of one step and serves them from a static arena."""
