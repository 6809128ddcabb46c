"""Storage map: a dictionary keyed by storage objects, since addresses are reused within a step and objects are not (R2).

A weakref.WeakKeyDictionary whose lookup is one call into C, for it is consulted for every tensor that autograd saves. Keys
are weak; an entry goes with its storage, in whichever thread that dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import torch


class StorageMap:
    """Weak-keyed dictionary of storages.

    Args:
        brief: for a map that lives as long as a layer's forward and its recompute. Entries of dead storages then go with
            the map: removing them one by one needs a callback that refers to the map, and such a cycle would wait for the
            garbage collector.
    """

    __slots__ = ("_entries", "_forget", "find")

    def __init__(self, *, brief: bool = False) -> None:
        self._entries: dict[ref[torch.UntypedStorage], Any] = {}
        self._forget = None if brief else self._entries.pop
        self.find: Callable[[ref[torch.UntypedStorage]], Any] = self._entries.get
        """Returns the value of a storage by a weak reference to it; None if there is none."""

    def __setitem__(self, storage: torch.UntypedStorage, value: object) -> None:
        # An entry that exists keeps its key; this reference then dies, and its callback does not run.
        self._entries[ref(storage, self._forget)] = value

    def __len__(self) -> int:
        return len(self._entries)
