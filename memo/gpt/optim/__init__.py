"""The optimizer, its learning-rate schedule, and the guard against bad losses."""
