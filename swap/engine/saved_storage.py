"""One saved storage: what it is, where its bytes are, and which way its life may go (rules R2, R4, R11).

    Handle --strong--> Hold --strong--> SavedStorage
      ^ what pack       ^ weak: identity map, groups, recomputes
        returned

Autograd holds handles. When the last handle of a storage dies its hold dies, and with it the SavedStorage, which tells the
engine to give everything back; nothing else ends a life, so a graph that is never backwarded frees itself (R1).

Weak references point at the hold and never at the SavedStorage. An object with a finalizer can be found by its weak
references until the finalizer is over; another thread that found it then would share a life that is being ended. A hold has
no finalizer: whoever gets one keeps the life going, and whoever comes too late gets None.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, final
from weakref import ref

import torch
from torch.nn import Parameter

from memo.errors import ModifiedAfterSave
from memo.events import TensorState as State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memo.swap.backends.protocol import Timed
    from memo.swap.engine.token_prefix import TokenPrefix
    from memo.swap.engine.trace_events import Began
    from memo.swap.placement import Quota
    from memo.swap.tiers.host_and_disk import Place

__all__ = [
    "AWAY",
    "BACK",
    "GONE",
    "LEAVING",
    "LIVE",
    "RETURNING",
    "Content",
    "Geometry",
    "Group",
    "Handle",
    "Hold",
    "Kept",
    "SavedStorage",
    "Sharded",
    "State",
    "by_home",
    "content_of",
    "version_of",
]

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
    # back to away: one half of backward is done with it, and the tier has it still
    BACK: frozenset({AWAY, GONE}),
    GONE: frozenset(),
}

# Offset, size and stride of a tensor in its storage, in elements.
Geometry = tuple[int | torch.SymInt, torch.Size, tuple[int, ...]]

# What a storage held when it was saved: a state of a version counter, and the part that it counts for where that is not all.
Content = tuple[int, Geometry | None]


def content_of(tensor: torch.Tensor) -> Content:
    """Two tensors over one storage with the same content may share a copy of it.

    Views share the counter of their base. What is no view and does not cover its storage, as each part that `unsafe_chunk`
    makes, has a counter of its own: as many changes of another part are another content.
    """
    version = tensor._version
    if version == 0:
        return 0, None  # nobody has changed it in place
    owner = tensor if tensor._base is None else tensor._base
    if owner.numel() * owner.itemsize == owner.untyped_storage().nbytes():
        return version, None
    return version, (owner.storage_offset(), owner.size(), owner.stride())


def version_of(tensor: torch.Tensor) -> int:
    """A state of its version counter; one made in inference mode has none, and cannot be changed outside of it."""
    return 0 if tensor.is_inference() else tensor._version


_ids = itertools.count(1)


class Group:
    """Storages saved by one call of one layer."""

    __slots__ = ("alive", "began", "external", "held", "index", "key", "module", "quota", "saved", "wait_for_next")

    def __init__(self, index: int, key: tuple[int, int], module: str, *, wait_for_next: bool) -> None:
        self.index = index  # position in the forward order since the engine was last empty
        self.key = key  # (layer, how often this layer was called since then)
        self.module = module
        self.wait_for_next = wait_for_next  # copies begin only when another layer follows
        self.held = False  # copies begin only when it is known what of each storage moves
        self.saved: list[ref[Hold]] = []
        self.alive = 0  # how many of these are
        self.external: set[torch.UntypedStorage] = set()
        self.quota: Quota | None = None  # where its storages go; without one, to the first tier with room
        self.began: Began | None = None  # its forward; noted only for a trace

    def living(self) -> list[SavedStorage]:
        """What still has handles, in the order it was saved."""
        return [hold.saved for weak in self.saved if (hold := weak()) is not None]


class SavedStorage:
    """The life of one storage with one content.

    Who holds the bytes: LIVE and LEAVING `source`; AWAY `place`; RETURNING and BACK `place` and `returned`.
    With `part`, `place` has the first tokens alone, and is None where there are none.
    """

    __slots__ = (
        "changed",
        "content",
        "dropped",
        "group",
        "hold",
        "home",
        "id",
        "nbytes",
        "out",
        "part",
        "place",
        "returned",
        "returning",
        "source",
        "state",
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
        self.home = home  # the compute stream that it was saved on, and that its reload buffer belongs to
        self.user = home  # the compute stream whose end is after all that was written into that buffer
        self.state = LIVE
        self.source: torch.Tensor | None = source
        self.place: Place | None = None
        self.out: Timed | None = None  # end of the copy out
        self.part: TokenPrefix | None = None  # set where only the first tokens move and the others are computed again
        self.returned: torch.Tensor | None = None
        self.returning: Timed | None = None  # end of the reload
        self.dropped = dropped
        self.changed = changed  # told of each transition, for a trace

    def __del__(self) -> None:
        # The engine takes it into its queue, which brings the object back for a moment; Python calls this only once.
        self.dropped(self)

    def move_to(self, state: State) -> None:
        """The one place where a state changes, and tells of it.

        Raises:
            AssertionError: the transition is not in the table; a bug of the engine, never of its user.
        """
        if state not in _NEXT[self.state]:
            raise AssertionError(f"saved storage {self.id} cannot go from {self.state} to {state}")
        self.state = state
        if self.changed is not None:
            self.changed(self)

    @property
    def module(self) -> str:
        """Name of the layer that saved it."""
        return self.group.module

    @property
    def moving_nbytes(self) -> int:
        """Bytes that rest in a tier: all, or the first tokens."""
        return self.nbytes if self.part is None else self.part.head_nbytes

    @property
    def on_device(self) -> bool:
        """True while the bytes take device memory."""
        return self.source is not None or self.returned is not None


def by_home(storages: Iterable[SavedStorage]) -> dict[int, list[SavedStorage]]:
    """The storages of each compute stream, in their order; mostly all are of one."""
    found: dict[int, list[SavedStorage]] = {}
    for saved in storages:
        found.setdefault(saved.home, []).append(saved)
    return found


class Kept:
    """A saved tensor that stays where it is; watched for in-place changes all the same (R4)."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A detached alias shares memory and version counter but not the graph: holding the tensor itself would tie an
        # operation's output to its own node for ever. A parameter is nobody's output.
        self.tensor = tensor if type(tensor) is Parameter else tensor.detach()
        self.version = tensor._version

    def modified(self) -> ModifiedAfterSave:
        """What to raise when the tensor's version is no longer `version`."""
        return _modified(self.tensor.shape, self.tensor.dtype, self.version, self.tensor._version)


class Hold:
    """Shared by the handles of one storage, and by them alone; the storage's life does not end while this exists."""

    __slots__ = ("__weakref__", "saved")

    def __init__(self, saved: SavedStorage) -> None:
        self.saved = saved
        saved.hold = ref(self)


@final
class Handle:
    """Returned by pack for a storage that may move: a share in its life, and the exact geometry of this tensor in it.

    `guard` is an empty tensor of the same type that shares the saved tensor's version counter and holds none of its memory:
    the in-place check that autograd loses behind hooks.
    """

    __slots__ = ("geometry", "guard", "hold", "version")

    def __init__(self, tensor: torch.Tensor, hold: Hold, geometry: Geometry, nothing: torch.Tensor) -> None:
        self.hold = hold
        self.geometry = geometry
        self.guard = guard = tensor.detach()
        self.version = guard._version
        guard.data = nothing  # of the same type

    def modified(self) -> ModifiedAfterSave:
        """What to raise when the guard's version is no longer `version`."""
        return _modified(self.geometry[1], self.guard.dtype, self.version, self.guard._version, self.hold.saved.module)


class Sharded:
    """A DTensor: what pack returned for its local part, and how the whole is made of it.

    `guard` is a DTensor with nothing in it that shares the version counter: a change of the whole is not
    counted at its local part (R4).
    """

    __slots__ = ("guard", "kind", "local", "spec", "version")

    def __init__(self, tensor: torch.Tensor, local: Handle | Kept) -> None:
        self.kind: Any = type(tensor)
        self.spec = tensor._spec  # type: ignore[attr-defined]
        self.local = local
        guard: Any = tensor.detach()
        guard._local_tensor = None
        self.guard: torch.Tensor = guard
        self.version = self.guard._version

    def modified(self) -> ModifiedAfterSave:
        """What to raise when the guard's version is no longer `version`."""
        return _modified(self.guard.shape, self.guard.dtype, self.version, self.guard._version)

    def rebuild(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor over `local`."""
        whole: torch.Tensor = self.kind(local, self.spec, requires_grad=False)
        return whole


def _modified(
    shape: torch.Size, dtype: torch.dtype, saved: int, now: int, module: str | None = None
) -> ModifiedAfterSave:
    where = f" in {module}" if module else ""
    return ModifiedAfterSave(
        f"a tensor{where} of shape {tuple(shape)} and type {dtype} that backward needs was changed in place after it was "
        f"saved (version {now}, saved at version {saved}); use an out-of-place operation, or change it before it is used"
    )
