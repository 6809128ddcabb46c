"""Guards of a recompute: RNG state, autocast, module state, side effects of the forward."""
