"""Settings of managed models's tests."""

from quick_collections import quick_collections

__all__ = ["quick_collections"]
