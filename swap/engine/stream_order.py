"""Orderings between compute streams and copies (R5): E1 to E6 are methods here, E7 is the host tier's.

A program may have several compute streams: two half batches layer by layer, branches of a layer, microbatches. A saved
storage has one *home*, the stream that it was saved on. Its reload buffer is allocated there too, since autograd runs
backward on the stream of its forward. E1, E2, E3 and E5 order the home stream, whichever stream the caller is on; E4 and E6
order the caller's.

    E1  copy out waits for an event of the home stream, taken when the operator that saves the tensor has been issued
    E2  the home stream waits for the copy out before the source is dropped; where another stream allocated the source, its
        memory is reused only after the home stream as well
    E3  reload waits for an event of the home stream, taken when its buffer was allocated there
    E4  each stream that asks for the buffer waits for the reload before autograd sees it
    E5  a buffer whose copy is in flight when its last handle dies stays in limbo until that copy is done
    E6  a stream that reads or writes a buffer runs after what another stream wrote into it: recomputed or decoded bytes
    E7  a copy out into room that was given back waits for the reload that left it (memo.swap.tiers.host_and_disk)

A buffer that a recompute allocated and wrote on the home stream (`Reload._adopt`) is ordered there by the program, and
elsewhere by E6; nothing copies it. There are no other orderings. Tests remove them one by one, and the race checker proves
each necessary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.swap.engine.saved_storage import LEAVING, RETURNING

if TYPE_CHECKING:
    from memo.swap.backends.protocol import Backend, Event
    from memo.swap.engine.saved_storage import SavedStorage


class StreamOrder:
    """Issues events and waits on one backend, for any number of compute streams."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def written(self, home: int) -> Event:
        """E1: an event after all that the home stream has issued, including the kernels that wrote what was saved on it."""
        return self._backend.compute_event(home)

    def copied_out(self, saved: SavedStorage) -> None:
        """E2: later work of the home stream runs after the copy out, so the source's memory may be reused."""
        if saved.out is not None:
            self._backend.compute_wait(saved.out, saved.home)
        self._leaves(saved)

    def allocated(self, home: int) -> Event:
        """E3: an event after the home stream's earlier work, which may still use the memory of a fresh buffer."""
        return self._backend.compute_event(home)

    def copied_back(self, saved: SavedStorage) -> None:
        """E4: later work of the caller's stream runs after the reload."""
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
        """E5: later work of the home stream runs after a copy in limbo, so its buffer may be reused."""
        self._backend.compute_wait(event, saved.home)
        self._leaves(saved)

    def taken_over(self, saved: SavedStorage) -> None:
        """E6: later work of the caller's stream runs after all that the buffer's last user has issued."""
        backend = self._backend
        here = backend.current_stream()
        if here != saved.user:
            backend.compute_wait(backend.compute_event(saved.user))
            saved.user = here

    def _leaves(self, saved: SavedStorage) -> None:
        """Tells the allocator that the home stream used the source, whose memory another stream may have allocated."""
        if saved.source is not None:
            self._backend.compute_uses(saved.source, saved.home, writes=False)
