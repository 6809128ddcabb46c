"""Saved storage: its content, its state machine, and the lifetime of its buffers (rules R2, R11).

    Handle --strong--> Hold --strong--> SavedStorage
      ^ result of       ^ weak: storage map, groups, recomputes
        pack

Autograd owns handles (memo.swap.engine.handles). When the last handle of a storage dies its Hold dies, and with it the
SavedStorage, whose finalizer tells the engine to release everything. Nothing else ends a life, so a graph that never runs
backward frees itself (R1).

Weak references point at the Hold and never at the SavedStorage. An object with a finalizer can be found by its weak
references until the finalizer is over; another thread that found it then would share a life that is ending. A Hold has no
finalizer: whoever dereferences it in time keeps the life going, and whoever comes too late gets None.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Protocol
from weakref import ref

import torch

from memo.errors import ModifiedAfterSave
from memo.events import TensorState as State
from memo.swap.checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memo.swap.backends.protocol import Timed
    from memo.swap.engine.coded_copy import CodedCopy
    from memo.swap.engine.layer_calls import Group
    from memo.swap.tiers.tier import Extent

# An attribute of an enumeration costs more to look up than all else in a transition.
LIVE = State.LIVE
LEAVING = State.LEAVING
AWAY = State.AWAY
RETURNING = State.RETURNING
BACK = State.BACK
GONE = State.GONE

_NEXT: dict[State, frozenset[State]] = {
    LIVE: frozenset({LEAVING, GONE}),
    # back to live: the copy out was cancelled, or failed with the source still held
    LEAVING: frozenset({AWAY, LIVE, GONE}),
    AWAY: frozenset({RETURNING, GONE}),
    RETURNING: frozenset({BACK, AWAY, GONE}),
    # back to away: half of a split backward is done with it, and the tier still has it
    BACK: frozenset({AWAY, GONE}),
    GONE: frozenset(),
}

Geometry = tuple[int | torch.SymInt, torch.Size, tuple[int, ...]]
"""Offset, size and stride of a tensor in its storage, in elements."""

Content = tuple[int, Geometry | None]
"""State of the version counter, and the part of the storage that it counts for where that is not all of it."""


UNCHANGED: Content = (0, None)
"""Never changed in place."""


def content_of(tensor: torch.Tensor) -> Content:
    """Identifies what a tensor's storage holds now: equal contents of one storage may share one copy of it.

    Views share the counter of their base. A tensor that is no view and does not cover its storage, as each part that
    `unsafe_chunk` makes, has a counter of its own: as many changes of another part are another content.
    """
    version = tensor._version
    if version == 0:
        return UNCHANGED
    owner = tensor if tensor._base is None else tensor._base
    if owner.numel() * owner.itemsize == owner.untyped_storage().nbytes():
        return version, None
    return version, (owner.storage_offset(), owner.size(), owner.stride())


def version_of(tensor: torch.Tensor) -> int:
    """State of the version counter; 0 for an inference tensor, which has none and cannot change outside inference mode."""
    return 0 if tensor.is_inference() else tensor._version


class HasHold(Protocol):
    """A saved storage that a recompute gives."""

    @property
    def hold(self) -> ref[Hold]:
        """Its Hold; dead when no handle is left."""


class FillCallback(Protocol):
    """Receives recomputed storages."""

    def __call__(self, wanted: HasHold, recomputed: torch.Tensor, /) -> None:
        """Receives one of them.

        Args:
            wanted: the saved storage.
            recomputed: all its bytes, in a storage allocated and written on the caller's stream that nobody writes from now
                on, and that is read on other streams only where the backend is told (`Backend.compute_uses`): the engine
                may keep it.
        """


class Recompute(Protocol):
    """Recompute of those of a layer's saved storages that no tier has."""

    @property
    def together(self) -> bool:
        """True if it has collectives: all ranks must run it at the same place in their backward."""

    def recompute(self, take: FillCallback, /) -> None:
        """Computes the storages unless all are there; `take` receives each."""


_ids = itertools.count(1)


class SavedStorage:
    """One storage with one content, from its first save to its release.

    Owner of the bytes by state: LIVE and LEAVING `source`; AWAY `extent`; RETURNING and BACK `extent` and `returned`.
    With `replay`, `extent` is None: no tier has the bytes, and `returned` gets them once the replay has run.

    Args:
        source: all bytes of the storage.
        nbytes: its size.
        content: its content at the save.
        group: the storages of the layer call that saved it.
        home: the compute stream that it was saved on.
        dropped: called by the finalizer, in any thread.
        changed: called after each state transition; None without a trace.
    """

    __slots__ = (
        "changed",
        "coded",
        "content",
        "dropped",
        "extent",
        "group",
        "hold",
        "home",
        "id",
        "is_read",
        "nbytes",
        "out",
        "readers",
        "replay",
        "replayed",
        "returned",
        "returning",
        "source",
        "state",
        "sum",
        "user",
    )

    def __init__(
        self,
        source: torch.Tensor,
        nbytes: int,
        content: Content,
        group: Group,
        home: int,
        dropped: Callable[[SavedStorage], None],
        changed: Callable[[SavedStorage], None] | None,
    ) -> None:
        self.id = next(_ids)
        self.hold: ref[Hold]  # dead when no handle is left
        self.nbytes = nbytes
        self.content = content
        self.group = group
        self.home = home  # the reload buffer belongs to this stream, too
        self.user = home  # the compute stream whose end is after all that was written into that buffer
        self.state = LIVE
        self.source: torch.Tensor | None = source
        self.is_read = False  # from its source, by backward
        self.extent: Extent | None = None
        self.out: Timed | None = None  # end of the copy out
        self.sum: torch.Tensor | None = None  # checksum of the source as it was copied out; None: not verified
        self.replay: Recompute | None = None  # gives the bytes in backward, in place of a tier
        self.replayed = False  # the reload buffer has them
        self.readers: tuple[ref[Recompute], ...] = ()  # recomputes that read its bytes, each a part of several
        self.coded: CodedCopy | None = None  # set where what moves is coded
        self.returned: torch.Tensor | None = None  # the reload buffer
        self.returning: Timed | None = None  # end of the reload
        self.dropped = dropped
        self.changed = changed

    def __del__(self) -> None:
        # The engine's queue resurrects the object until it is released; Python calls this only once.
        self.dropped(self)

    def move_to(self, state: State) -> None:
        """Changes the state, and reports the transition; nothing else writes `state`.

        Raises:
            AssertionError: the transition is not in the table; a bug of the engine, never of its user.
        """
        if state not in _NEXT[self.state]:
            raise AssertionError(f"saved storage {self.id} cannot go from {self.state} to {state}")
        self.state = state
        if self.changed is not None:
            self.changed(self)

    def verify(self, tensor: torch.Tensor) -> None:
        """Compares the storage of a tensor that is saved again with the bytes that were copied out. Waits for the device.

        Raises:
            ModifiedAfterSave: they differ.
        """
        if self.state is not LIVE and self.sum is not None and checksum(tensor).item() != self.sum.item():
            raise ModifiedAfterSave(
                f"a tensor in {self.module} of shape {tuple(tensor.shape)} and type {tensor.dtype} is saved again with other"
                " bytes, and nothing counted the change: a write through .data, NumPy, DLPack or its storage; write into the"
                " tensor itself under torch.no_grad(), or into a copy"
            )

    @property
    def module(self) -> str:
        """Name of the layer that saved it."""
        return self.group.module

    @property
    def place_nbytes(self) -> int:
        """Bytes that rest in a tier, or would: all, or their codes."""
        return self.nbytes if self.coded is None else self.coded.nbytes(self.nbytes)

    @property
    def lacks_replay(self) -> bool:
        """True until its replay has run."""
        return self.replay is not None and self.source is None and not self.replayed

    @property
    def on_device(self) -> bool:
        """True while the bytes take device memory."""
        return self.source is not None or self.returned is not None


class Hold:
    """The one strong reference to a SavedStorage, shared by the handles of its storage and by nothing else."""

    __slots__ = ("__weakref__", "saved")

    def __init__(self, saved: SavedStorage) -> None:
        self.saved = saved
        saved.hold = ref(self)


def by_home(storages: Iterable[SavedStorage]) -> dict[int, list[SavedStorage]]:
    """Storages by home stream, in their order; mostly all have one home."""
    found: dict[int, list[SavedStorage]] = collections.defaultdict(list)
    for saved in storages:
        found[saved.home].append(saved)
    return found
