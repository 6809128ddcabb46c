"""Tier choice: the tier that a storage is copied to, the first with room or the one of its layer's placement (R8).

It owns the tiers' order, the placements and their quotas, and the response to full tiers (`WhenFull`). It does not own the
bytes: whoever gets an extent fills it and gives it back. Not thread-safe: callers hold the engine lock, except for `place`.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

from memo.errors import HostBudgetExceeded, ScratchFull, SwapError, UsageError
from memo.events import TierName as TierName
from memo.swap.placement import Quota
from memo.swap.tiers.host_and_disk import PAGE
from memo.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memo.swap.engine.layer_calls import Group
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.engine.spills import Spills
    from memo.swap.placement import Placement
    from memo.swap.stats import Stats
    from memo.swap.tiers.tier import Extent, Tier


class WhenFull(enum.Enum):
    """Response to a full tier. Except for STAY it is an error where no tier has room for a storage."""

    RAISE = enum.auto()
    """An error, although another tier may have room."""
    SPILL = enum.auto()
    """The next tier with room takes the bytes."""
    RECOMPUTE = enum.auto()
    """The next tier; a layer that no tier has room for is recomputed whole and moves its input alone, and what is kept at
    every level. As much is left free for each layer after it."""
    STAY = enum.auto()
    """The next tier, then the device within `rest_bytes`; a layer that neither has room for is recomputed whole, and what
    cannot be recomputed stays on the device all the same."""


class TierChoice:
    """The tiers of one engine.

    Args:
        tiers: destinations in the order they are tried.
        when_full: response to a full tier.
        stats: counters to update.
        spills: what found no room in its tier.
        warn: warns once of each cause.
        make_room: called before a tier is taken for full, since copies of dropped storages may still hold some of it.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        when_full: WhenFull,
        stats: Stats,
        spills: Spills,
        warn: Callable[[str, str], None],
        make_room: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._first = tiers[0]
        self.when_full = when_full
        self._stats = stats
        self._spills = spills
        self._warn = warn
        self._make_room = make_room
        # For each tier: that tier, then the others in order, for when it is full.
        self._beginning_with: dict[TierName, list[Tier]] = {
            first.name: [first, *(tier for tier in tiers if tier is not first)] for first in tiers
        }
        self._placements: dict[int, Placement] = {}
        self._rest_bytes = 0
        self._saved_nbytes: dict[int, int] = {}  # bytes that the latest full call of each placed layer saved
        self._largest_nbytes = 0  # of one storage of a placed layer
        self._latest: tuple[int, Quota] | None = None  # the layer that began last, and its quota

    def place(self, placements: Mapping[int, Placement], *, rest_bytes: int = 0) -> None:
        """Sets the layers' placements from their next calls on (`Engine.place`).

        Raises:
            UsageError: a placement sends bytes to a tier that is not there; nothing changes.
        """
        present = (TierName.DEVICE, *self._beginning_with)
        for layer, placement in placements.items():
            for tier, fraction in placement.fractions.items():
                if fraction > 0 and tier not in present:
                    raise UsageError(
                        f"placement: layer {layer} sends {fraction:.0%} of its bytes to {tier}, which is off"
                    )
        self._placements = dict(placements)
        self._rest_bytes = rest_bytes
        self._saved_nbytes.clear()  # at other recompute levels a layer saves something else
        self._largest_nbytes = 0

    def quota(self, layer: int) -> Quota | None:
        """Returns the quota of a call of `layer` that begins now; None for a layer without a placement.

        What the layer before it left each tier lacking is carried over, so that shares hold to within one storage over a
        whole pass. A pass begins where layer numbers are not consecutive, or where the placement says so.
        """
        placement = self._placements.get(layer)
        before, self._latest = self._latest, None
        if placement is None:
            return None
        follows = before is not None and before[0] == layer - 1 and not placement.begins
        carried = before[1].carried if before is not None and follows else {}
        expected = self._saved_nbytes.get(layer, placement.nbytes)
        quota = Quota(placement, expected_nbytes=expected, carried=carried)
        self._latest = layer, quota
        return quota

    def reserve(self, saved: SavedStorage) -> Extent | None:
        """Reserves room for a storage, or for its codes; None where it stays on the device.

        Raises:
            HostBudgetExceeded, ScratchFull: no tier has room, and it may not stay; nothing is reserved.
        """
        quota, nbytes, room = saved.group.quota, saved.nbytes, saved.place_nbytes
        if quota is None:
            extent = self._first.reserve(room)
            if extent is not None:
                return extent
            chosen, tiers = self._first.name, self._tiers
        else:
            chosen = quota.choose(nbytes)
            tiers = self._beginning_with.get(chosen, self._tiers)
            if not saved.group.recomputed_for_room:
                self._saved_nbytes[saved.group.key[0]] = quota.nbytes
                self._largest_nbytes = max(self._largest_nbytes, nbytes)
        if chosen is not TierName.DEVICE:
            extent = self._reserve(saved, room, tiers)
            if extent is not None:
                return extent
            owed = 0.0 if quota is None or self.when_full is WhenFull.RAISE else quota.unkept_nbytes
            if not owed or self.when_full is WhenFull.STAY:
                self._stay_or_raise(saved, nbytes, tiers)
            # Rounding to whole storages moved more than planned. What the device keeps above its share is no part of it.
            if quota is not None and owed and (owed >= nbytes or self.when_full is not WhenFull.STAY):
                quota.keeps_instead(chosen, nbytes)
        saved.coded = None  # what the device keeps is exact
        self._stats.bytes_kept += nbytes
        return None

    def reserve_elsewhere(self, saved: SavedStorage, *, than: Tier) -> Extent | None:
        """Reserves room for what moves of `saved` in another tier than the one whose write failed; None: there is none."""
        others = [] if self.when_full is WhenFull.RAISE else [tier for tier in self._tiers if tier is not than]
        return _first_extent(others, saved.place_nbytes)

    def reserve_exact(self, saved: SavedStorage, *, like: Tier) -> Extent | None:
        """Reserves room, beginning with the tier `like`, for a storage that moves again as it is; None where it stays.

        Raises:
            HostBudgetExceeded, ScratchFull: no tier has room, and it may not stay; nothing is reserved.
        """
        tiers, nbytes = self._beginning_with[like.name], saved.nbytes
        extent = self._reserve(saved, nbytes, tiers)
        if extent is None:
            self._stay_or_raise(saved, nbytes, tiers)
        return extent

    def stays(self, saved: SavedStorage, nbytes: int, *, full: TierName) -> None:
        """Counts bytes that no tier has room for and that stay on the device; warns once where it has no room either."""
        self._spills.add(saved.group, nbytes, full, TierName.DEVICE)
        if self._stats.device_bytes + nbytes > self._rest_bytes:
            self._warn(
                "no-room",
                f"no room for {format_bytes(nbytes)} saved by {saved.module} ({', '.join(map(_state, self._tiers))}), nor "
                f"on the device within its share: it stays on the device; raise the {' or '.join(self._present)} budget, or "
                "train on a shorter sequence",
            )

    def recomputes(self, group: Group, lacking_nbytes: int) -> None:
        """Counts bytes of a group that no tier has room for, so that its layer is recomputed whole."""
        group.recomputed_for_room = True
        missing = {} if group.quota is None else group.quota.missing
        full = max(self._tiers, key=lambda tier: missing.get(tier.name, 0.0))  # the first of equals
        self._spills.add(group, lacking_nbytes, full.name, None)

    def may_lack_room(self, layer: int) -> bool:
        """True where a call of `layer` that begins now may need more room than tiers and device have, by its last call."""
        placement = self._placements.get(layer)
        if placement is None:
            return False
        saved = self._saved_nbytes.get(layer, placement.nbytes)
        lacking = saved * (1 - placement.kept) + self._largest_nbytes - self._free_nbytes()
        return lacking > 0 and self._stats.device_bytes + saved + lacking > self._rest_bytes

    def has_room_for(self, group: Group, *, calls: int) -> bool:
        """True where so many calls, each of which saves as much as `group`, have room by sums alone."""
        return calls * (group.nbytes + PAGE * len(group.saved)) <= self._free_nbytes()

    def lacking_nbytes(self, group: Group, sizes: Sequence[tuple[int, int]], *, besides: Sequence[int]) -> int:
        """Bytes of a group's storages that have no room now; 0: all have.

        Args:
            group: theirs.
            sizes: of each the bytes that move, if they go by the group's quota, and those that a tier needs for them.
            besides: blocks that later layers need in any case; not counted with STAY.
        """
        if self.when_full is WhenFull.STAY:
            return self._lacking_nbytes(group, sizes)
        self._make_room()
        wanted = [nbytes for nbytes in (*_moving(group.quota, sizes), *besides) if nbytes]
        extents = [
            _first_extent(self._tiers, nbytes) for nbytes in wanted
        ]  # reserved to find out, and given back at once
        for extent in extents:
            if extent is not None:
                extent.tier.release(extent)
        return sum(nbytes for nbytes, extent in zip(wanted, extents, strict=True) if extent is None)

    def _lacking_nbytes(self, group: Group, sizes: Sequence[tuple[int, int]]) -> int:
        """Bytes of a group that tiers have no room for, where they and the device lack it, by sums alone."""
        if self.has_room_for(group, calls=1) or group.wait_for_next:
            return 0
        self._make_room()
        lacking = sum(-(-nbytes // PAGE) * PAGE for nbytes in _moving(group.quota, sizes)) - self._free_nbytes()
        return 0 if self._stats.device_bytes + lacking <= self._rest_bytes else max(0, int(lacking))

    def _free_nbytes(self) -> float:
        return sum(math.inf if tier.free is None else tier.free for tier in self._tiers)

    def _reserve(self, saved: SavedStorage, nbytes: int, tiers: Sequence[Tier]) -> Extent | None:
        """Reserves room in the first of `tiers`, or where it is full and may be left in the first with room."""
        extent = tiers[0].reserve(nbytes)
        if extent is None:
            self._make_room()
            extent = _first_extent(tiers[:1] if self.when_full is WhenFull.RAISE else tiers, nbytes)
            if extent is not None and extent.tier is not tiers[0]:
                self._stats.spilled += 1
                self._spills.add(saved.group, nbytes, tiers[0].name, extent.tier.name)
        return extent

    def _stay_or_raise(self, saved: SavedStorage, nbytes: int, tiers: Sequence[Tier]) -> None:
        """Counts a storage that no tier has room for as staying, or raises."""
        if self.when_full is not WhenFull.STAY:
            tiers = tiers[:1] if self.when_full is WhenFull.RAISE else tiers
            raise _no_room(saved, saved.place_nbytes, tiers, present=self._present)
        self.stays(saved, nbytes, full=tiers[0].name)

    @property
    def _present(self) -> list[TierName]:
        return [tier.name for tier in self._tiers]


def _moving(quota: Quota | None, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """The bytes that tiers need for those that move by a quota."""
    if quota is None:
        return [room for _, room in sizes]
    trial = quota.copy()
    return [room for nbytes, room in sizes if nbytes and trial.choose(nbytes) is not TierName.DEVICE]


def _first_extent(tiers: Sequence[Tier], nbytes: int) -> Extent | None:
    return next((extent for tier in tiers if (extent := tier.reserve(nbytes)) is not None), None)


def _state(tier: Tier) -> str:
    words = f"{tier.name} {format_bytes(tier.used)} used"
    if tier.budget is not None and tier.obtainable is not None:
        words += f" of {format_bytes(tier.budget)}"
        if tier.obtainable < tier.budget:
            words += f", of which other jobs leave {format_bytes(tier.obtainable)}"
    if tier.refusal is not None:
        words += f"; {tier.refusal}"
    return words


def _no_room(saved: SavedStorage, nbytes: int, tiers: Sequence[Tier], *, present: Sequence[TierName]) -> SwapError:
    """The error for bytes that none of `tiers` has room for, with the engine's tiers `present` to choose advice by."""
    state = ", ".join(map(_state, tiers))
    kind = ScratchFull if tiers[-1].name is TierName.DISK else HostBudgetExceeded
    budgets = " or ".join(tier.name for tier in tiers if tier.name is not TierName.DEVICE)
    absent = next((name for name in (TierName.DISK, TierName.HOST) if name not in present), None)
    more = "" if absent is None else f"{absent}=..., "
    return kind(
        f"no room for {format_bytes(nbytes)} saved by {saved.module} ({state}); raise the {budgets} budget, or give {more}"
        "on_full='recompute' or, above alpha 0, a smaller alpha"
    )
