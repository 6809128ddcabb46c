"""Tier choice: the tier that a storage is copied to, the first with room or the one of its layer's placement (R8).

It owns the tiers' order, the placements and their quotas, and the error when no tier has room. It does not own the bytes:
whoever gets a place fills it and gives it back. Not thread-safe: callers hold the engine lock, except for `place`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.errors import HostBudgetExceeded, ScratchFull, SwapError, UsageError
from memo.events import Tier as TierName
from memo.swap.placement import Quota
from memo.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.engine.spills import Spills
    from memo.swap.placement import Placement
    from memo.swap.stats import Stats
    from memo.swap.tiers.device import DeviceTier
    from memo.swap.tiers.protocol import Place, Tier

__all__ = ["TierChoice"]


class TierChoice:
    """The tiers of one engine.

    Args:
        tiers: destinations in the order they are tried.
        on_device: takes the kept prefixes of storages whose other tokens are recomputed; whole storages just stay.
        spill: a full tier passes storages on to the next; otherwise it is an error.
        stats: counters to update.
        spills: what found no room in its tier and went to another.
        make_room: called before a tier is taken for full, since copies of dropped storages may still hold some of it.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        on_device: DeviceTier,
        *,
        spill: bool,
        stats: Stats,
        spills: Spills,
        make_room: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._first = tiers[0]
        self._spill = spill
        self._stats = stats
        self._spills = spills
        self._make_room = make_room
        # For each tier: that tier, then the others in order, for when it is full.
        self._beginning_with: dict[TierName, list[Tier]] = {
            first.name: [first, *(tier for tier in tiers if tier is not first)] for first in (on_device, *tiers)
        }
        self._placements: dict[int, Placement] = {}
        self._rest_bytes = 0
        self._saved_nbytes: dict[int, int] = {}  # bytes that the latest call of each placed layer saved
        self._latest: tuple[int, Quota] | None = None  # the layer that began last, and its quota

    def place(self, placements: Mapping[int, Placement], *, rest_bytes: int = 0) -> None:
        """Sets the layers' placements from their next calls on (`Engine.place`).

        Raises:
            UsageError: a placement sends bytes to a tier that is not there; nothing changes.
        """
        present = self._beginning_with.keys()
        for layer, placement in placements.items():
            for tier, fraction in placement.fractions.items():
                if fraction > 0 and tier not in present:
                    raise UsageError(
                        f"placement: layer {layer} sends {fraction:.0%} of its bytes to {tier}, which is off"
                    )
        self._placements = dict(placements)
        self._rest_bytes = rest_bytes
        self._saved_nbytes.clear()  # at other recompute levels a layer saves something else

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

    def claim(self, saved: SavedStorage, nbytes: int) -> Place | None:
        """Claims room for the `nbytes` of `saved` that move, or for their codes; None where it stays on the device, by plan.

        Raises:
            HostBudgetExceeded, ScratchFull: no tier has room; nothing is claimed.
        """
        quota, room = saved.group.quota, saved.place_nbytes
        if quota is None:
            place = self._first.claim(room)
            if place is not None:
                return place
            chosen, tiers = self._first.name, self._tiers
        else:
            chosen = quota.choose(nbytes)
            tiers = self._beginning_with[chosen]
            self._saved_nbytes[saved.group.key[0]] = quota.nbytes
        if chosen is not TierName.DEVICE:
            try:
                return self._claim(saved, room, tiers)
            except (HostBudgetExceeded, ScratchFull):
                if not self._may_stay(quota):
                    raise
                if quota is not None:
                    quota.keeps_instead(chosen, nbytes)
        saved.coded = None  # what the device keeps is exact
        if saved.prefix is None:
            self._stats.bytes_kept += nbytes
            return None
        return self._claim(saved, nbytes, self._beginning_with[TierName.DEVICE])

    def _may_stay(self, quota: Quota | None) -> bool:
        """True if the device has room, or holds too little since rounding to whole storages moved more than planned."""
        owed = quota is not None and quota.unkept_nbytes > 0
        return self._spill and (owed or self._stats.device_bytes <= self._rest_bytes)

    def claim_elsewhere(self, nbytes: int, *, than: Tier) -> Place | None:
        """Claims room in another tier than the failed one; None where there is none, or without `spill`."""
        others = [tier for tier in self._tiers if tier is not than] if self._spill else []
        return _first_place(others, nbytes)

    def claim_exact(self, saved: SavedStorage, *, like: Tier) -> Place:
        """Claims room, beginning with the tier `like`, for a storage that moves again as it is.

        Raises:
            HostBudgetExceeded, ScratchFull: no tier has room; nothing is claimed.
        """
        return self._claim(saved, saved.moving_nbytes, self._beginning_with[like.name])

    def fit(self, sizes: Sequence[int], quota: Quota | None, *, besides: Sequence[int]) -> bool:
        """True if storages of `sizes` bytes under `quota`, and blocks of `besides` bytes, have room now.

        Claims the room to find out, and gives it back at once.
        """
        if quota is not None:
            trial = quota.copy()
            sizes = [nbytes for nbytes in sizes if nbytes and trial.choose(nbytes) is not TierName.DEVICE]
        self._make_room()
        places = [_first_place(self._tiers, nbytes) for nbytes in (*sizes, *besides) if nbytes]
        for place in places:
            if place is not None:
                place.release()
        return None not in places

    def _claim(self, saved: SavedStorage, nbytes: int, tiers: Sequence[Tier]) -> Place:
        tiers = tiers if self._spill else tiers[:1]
        place = tiers[0].claim(nbytes)
        if place is None:
            self._make_room()
            place = _first_place(tiers, nbytes)
            if place is None:
                raise _no_room(saved, nbytes, tiers, present=[tier.name for tier in self._tiers])
            if place.tier is not tiers[0]:
                self._stats.spilled += 1
                self._spills.add(saved.group, nbytes, tiers[0].name, place.tier.name)
        return place


def _first_place(tiers: Sequence[Tier], nbytes: int) -> Place | None:
    return next((place for tier in tiers if (place := tier.claim(nbytes)) is not None), None)


def _state(tier: Tier) -> str:
    words = f"{tier.name} {format_bytes(tier.used)} used"
    if tier.budget is not None and tier.obtainable is not None:
        words += f" of {format_bytes(tier.budget)}"
        if tier.obtainable < tier.budget:
            words += f", of which other jobs leave {format_bytes(tier.obtainable)}"
    return words


def _no_room(saved: SavedStorage, nbytes: int, tiers: Sequence[Tier], *, present: Sequence[TierName]) -> SwapError:
    """The error for bytes that none of `tiers` has room for, with the engine's tiers `present` to choose advice by."""
    state = ", ".join(map(_state, tiers))
    kind = ScratchFull if tiers[-1].name is TierName.DISK else HostBudgetExceeded
    budgets = " or ".join(tier.name for tier in tiers if tier.name is not TierName.DEVICE)
    absent = next((name for name in (TierName.DISK, TierName.HOST) if name not in present), None)
    others = "train on a shorter sequence"
    if absent is not None:
        others = f"give memo.offload {absent}=..., a smaller alpha or on_full='recompute'"
    return kind(
        f"no room for {format_bytes(nbytes)} saved by {saved.module} ({state}); raise the {budgets} budget, or {others}"
    )
