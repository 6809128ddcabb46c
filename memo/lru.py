"""A dictionary that keeps what was used last: for what is remembered of ever new shapes, which must not be all of them."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

__all__ = ["LRU"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class LRU(Generic[_Key, _Value]):
    """Of more than `most` entries the one not used for longest goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: collections.OrderedDict[_Key, _Value] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: _Key) -> bool:
        return self.get(key) is not None

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def get(self, key: _Key) -> _Value | None:
        """None for what is not there; otherwise it has been used."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found
