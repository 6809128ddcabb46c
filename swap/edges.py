"""The orderings between compute streams and copies, one method each (R5).

A program may have several compute streams: two half batches layer by layer, branches of a layer, microbatches. A saved
storage has one *home*, the stream that it was saved on. Its reload buffer is allocated there too, since backward runs on the
stream of its forward. Every edge is of that stream, whichever stream its caller is on.

    E1  copy out waits for an event of the home stream, taken when the tensor is saved or later
    E2  the home stream waits for the copy out before the source is dropped; memory of another stream waits for the home
    E3  reload waits for an event of the home stream, taken when its buffer was allocated there
    E4  each stream that asks for the buffer waits for the reload before autograd sees it
    E5  a buffer whose copy is in flight when its last handle dies stays in limbo until that copy is done
    E6  a stream that reads or writes a buffer runs after what another stream wrote into it: recomputed or scattered tokens
    E7  a copy out into room that was given back waits for the reload that left it (memo.swap.tiers)
    E8  the streams of a recompute that ends in the middle of its layer wait for one another

There are no others. The checking backend proves each of them necessary: a test takes them out one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.swap.saved import LEAVING, RETURNING

if TYPE_CHECKING:
    from collections.abc import Collection

    from memo.swap.backend import Backend, Event
    from memo.swap.saved import SavedStorage

__all__ = ["Edges"]


class Edges:
    """Of one backend, for any number of compute streams."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def written(self, home: int) -> Event:
        """E1: what the stream has issued so far, the kernels of what was saved on it among it."""
        return self._backend.compute_event(home)

    def copied_out(self, saved: SavedStorage) -> None:
        """E2: what the home stream issues from now on runs after the copy out, so the source's memory is free."""
        if saved.out is not None:
            self._backend.compute_wait(saved.out, saved.home)
        self._leaves(saved)

    def allocated(self, home: int) -> Event:
        """E3: earlier work of the stream may still use the memory that a fresh buffer was made of."""
        return self._backend.compute_event(home)

    def copied_back(self, saved: SavedStorage) -> None:
        """E4: what the caller's stream issues from now on runs after the reload."""
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

    def abandoned(self, saved: SavedStorage, event: Event) -> None:
        """E5: what the home stream issues from now on runs after a copy in limbo, so its buffer is free."""
        self._backend.compute_wait(event, saved.home)
        self._leaves(saved)

    def taken_over(self, saved: SavedStorage) -> None:
        """E6: what the caller's stream issues from now on runs after what the last user of the buffer has issued so far."""
        backend = self._backend
        here = backend.here()
        if here != saved.user:
            backend.compute_wait(backend.compute_event(saved.user))
            saved.user = here

    def broken_off(self, streams: Collection[int]) -> None:
        """E8: the layer's own waits have not been reached, and the memory that its streams share is free from now on."""
        if len(streams) > 1:
            for event in [self._backend.compute_event(stream) for stream in streams]:
                for stream in streams:
                    self._backend.compute_wait(event, stream)

    def _leaves(self, saved: SavedStorage) -> None:
        """The source's memory may be another stream's, which then waits for the home stream before it is used again."""
        if saved.source is not None:
            self._backend.compute_uses(saved.source, saved.home, writes=False)
