"""Activation planning: what is kept, moved and recomputed, by a mixed-integer program; its cost and its checker."""
