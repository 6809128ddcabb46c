"""Settings of managed models's tests."""

from quick_collections import quick_collections as quick_collections
