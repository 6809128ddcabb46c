"""Settings of the engine's tests."""

from quick_collections import quick_collections

__all__ = ["quick_collections"]
