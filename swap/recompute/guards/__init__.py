"""What a recompute must find as the forward found it: random state, autocast, names, side effects."""
