"""Recompute: replays, in backward, the operators of a layer whose results were not saved."""
