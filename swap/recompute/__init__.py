"""Token-wise recompute: what a layer computes again in backward for the tokens that did not move."""
