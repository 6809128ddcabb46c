"""The edges that order the compute stream and the copies, one method each (R5).

    E1  copy out waits for the compute event taken at pack
    E2  compute waits for the copy out before its source is dropped
    E3  reload waits for the compute event taken when its buffer was allocated
    E4  compute waits for the reload before autograd sees the buffer
    E5  a buffer whose copy is in flight when its last handle dies stays in limbo until that copy is done

There are no others. The checking backend proves each of them necessary: a test takes them out one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.swap.saved import LEAVING, RETURNING

if TYPE_CHECKING:
    from memo.swap.backend import Backend, Event
    from memo.swap.saved import SavedStorage

__all__ = ["Edges"]


class Edges:
    """Of one backend, for whichever compute stream the caller is on."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def written(self) -> Event:
        """E1: what the compute stream has issued so far, the saved tensor's kernel among it."""
        return self._backend.compute_event()

    def copied_out(self, saved: SavedStorage) -> None:
        """E2: what the compute stream issues from now on runs after the copy out, so the source's memory is free."""
        if saved.out is not None:
            self._backend.compute_wait(saved.out)

    def allocated(self) -> Event:
        """E3: earlier work of the compute stream may still use the memory that a fresh buffer was made of."""
        return self._backend.compute_event()

    def copied_back(self, saved: SavedStorage) -> None:
        """E4: what the compute stream issues from now on runs after the reload."""
        if saved.returning is not None:
            self._backend.compute_wait(saved.returning)

    def in_flight(self, saved: SavedStorage) -> Event | None:
        """E5: the copy that may still touch the buffers of a storage whose handles are gone."""
        if saved.state is LEAVING:
            event = saved.out
        elif saved.state is RETURNING:
            event = saved.returning
        else:
            return None
        return None if event is None or event.query() else event
