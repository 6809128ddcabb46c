"""Checkpoints: written whole or not at all, in the background, by many ranks."""
