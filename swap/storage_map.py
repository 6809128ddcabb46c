"""Dictionary keyed by storage objects: addresses are reused within a step, objects are not (R2).

A weakref.WeakKeyDictionary whose lookup is one call into C: it is asked for every tensor that autograd saves. Keys are held
weakly; an entry goes with its storage, in whichever thread that dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import torch

__all__ = ["StorageMap"]


class StorageMap:
    """Storage -> anything.

    A `brief` one lasts no longer than a layer's forward and its recompute. What it knows of dead storages goes with it, not
    with them: whoever forgets one by one is held by what it may forget, and a cycle waits for the garbage collector.
    """

    __slots__ = ("_entries", "_forget", "find")

    def __init__(self, *, brief: bool = False) -> None:
        self._entries: dict[ref[torch.UntypedStorage], Any] = {}
        self._forget = None if brief else self._entries.pop
        self.find: Callable[[ref[torch.UntypedStorage]], Any] = self._entries.get
        """What is known of a storage, by a weak reference to it; None for nothing."""

    def __setitem__(self, storage: torch.UntypedStorage, known: object) -> None:
        # Where there is an entry already its key stays, and this reference dies unheard.
        self._entries[ref(storage, self._forget)] = known

    def __len__(self) -> int:
        return len(self._entries)
