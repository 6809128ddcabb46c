"""Dictionary of bounded size that evicts the least recently used entry."""

from __future__ import annotations

import collections
import threading
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class LRU(Generic[_Key, _Value]):
    """Least-recently-used cache. Assignment, `get` and `in` count as use; a value must not be None. Thread-safe.

    Args:
        capacity: entries that are kept; one more evicts the entry not used for longest.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: collections.OrderedDict[_Key, _Value] = collections.OrderedDict()
        self._lock = threading.RLock()  # keys may be hashed and compared in Python, where threads switch

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: _Key) -> bool:
        return self.get(key) is not None

    def __setitem__(self, key: _Key, value: _Value) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def pop(self, key: _Key) -> None:
        """Drops an entry, if there is one."""
        with self._lock:
            self._entries.pop(key, None)

    def get(self, key: _Key) -> _Value | None:
        """Returns the value and counts as a use; None for a missing key."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found
