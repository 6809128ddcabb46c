"""Token-wise recompute: replays a layer in backward on the tokens whose saved tensors did not move."""
