"""Checkpoints of a run: written completely or not at all, in the background, by one or many ranks."""
