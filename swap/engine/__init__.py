"""Offload engine: the life of each saved storage, its copies out and back, and their order on streams."""
