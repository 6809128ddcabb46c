"""Choice of the tier that a storage goes to: the first with room, or the one that its layer's placement says.

It owns the tiers' order, the placements and their accounts, and what is said when nothing has room. It does not own the
bytes: who gets a place must fill it and give it back. Not thread-safe; the engine's lock is held around every call but
`place`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.errors import HostBudgetExceeded, ScratchFull, SwapError, UsageError
from memo.events import Tier
from memo.swap.placement import Quota
from memo.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.placement import Placement
    from memo.swap.stats import Stats
    from memo.swap.tiers.device import DeviceTier
    from memo.swap.tiers.host_and_disk import Place, Tier as TierRoom

__all__ = ["TierChoice"]


class TierChoice:
    """The tiers of one engine.

    `on_device` takes what is kept of storages that are otherwise computed again; whole ones that are kept just stay.
    Without `spill` only the first choice counts. `make_room` is called before a tier is taken for full: what has been
    dropped may still hold some of it.
    """

    def __init__(
        self,
        tiers: Sequence[TierRoom],
        on_device: DeviceTier,
        *,
        spill: bool,
        stats: Stats,
        make_room: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._first = tiers[0]
        self._spill = spill
        self._stats = stats
        self._make_room = make_room
        # For each tier, all of them in order but this one first: the others stand by for when it is full.
        self._beginning_with: dict[Tier, list[TierRoom]] = {
            first.name: [first, *(tier for tier in tiers if tier is not first)] for first in (on_device, *tiers)
        }
        self._placements: dict[int, Placement] = {}
        self._rest_bytes = 0
        self._saved_nbytes: dict[int, int] = {}  # what each placed layer's latest call saved
        self._latest: tuple[int, Quota] | None = None  # the layer that began last, and its account

    def place(self, placements: Mapping[int, Placement], *, rest_bytes: int = 0) -> None:
        """Says where the layers' bytes go, by layer, from their next calls on; `rest_bytes` as the engine has it.

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
        self._saved_nbytes.clear()  # at other levels a layer saves something else

    def quota(self, layer: int) -> Quota | None:
        """The account of a call of `layer` that begins now; None where no placement says anything of it.

        What the layer before it kept too little may be kept here, so that over a whole pass the device lacks one storage at
        most; a pass begins where the layers do not go on.
        """
        placement = self._placements.get(layer)
        before, self._latest = self._latest, None
        if placement is None:
            return None
        goes_on = before is not None and before[0] == layer - 1 and not placement.begins
        carried = before[1].unkept_nbytes if before is not None and goes_on else 0.0
        expected = self._saved_nbytes.get(layer, placement.nbytes)
        quota = Quota(placement, expected_nbytes=expected, carried_nbytes=carried)
        self._latest = layer, quota
        return quota

    def claim(self, saved: SavedStorage, nbytes: int) -> Place | None:
        """Room for the `nbytes` of `saved` that move; None for a storage that stays on the device as it is, by plan.

        Raises:
            HostBudgetExceeded, ScratchFull: there is no room.
        """
        quota = saved.group.quota
        if quota is None:
            place = self._first.claim(nbytes)
            if place is not None:
                return place
            chosen, tiers = self._first.name, self._tiers
        else:
            chosen = quota.choose(nbytes)
            tiers = self._beginning_with[chosen]
            self._saved_nbytes[saved.group.key[0]] = quota.nbytes
        if chosen is not Tier.DEVICE:
            try:
                return self._claim(saved, nbytes, tiers)
            except (HostBudgetExceeded, ScratchFull):
                if not self._may_stay(quota):
                    raise
                if quota is not None:
                    quota.keeps_instead(chosen, nbytes)
        if saved.part is None:
            self._stats.bytes_kept += nbytes
            return None
        return self._claim(saved, nbytes, self._beginning_with[Tier.DEVICE])

    def _may_stay(self, quota: Quota | None) -> bool:
        """The device has room; or too little, since rounding to whole storages moved more than was planned."""
        owed = quota is not None and quota.unkept_nbytes > 0
        return self._spill and (owed or self._stats.device_bytes <= self._rest_bytes)

    def claim_elsewhere(self, nbytes: int, *, than: TierRoom) -> Place | None:
        """Room in another tier than the one that failed."""
        others = [tier for tier in self._tiers if tier is not than] if self._spill else []
        return _first_place(others, nbytes)

    def fit(self, sizes: Sequence[int], quota: Quota | None, *, besides: Sequence[int]) -> bool:
        """Whether storages of a layer with this account, and blocks of as many bytes as `besides` says, have room now.

        What it takes to know is given back at once.
        """
        if quota is not None:
            trial = quota.copy()
            sizes = [nbytes for nbytes in sizes if nbytes and trial.choose(nbytes) is not Tier.DEVICE]
        self._make_room()
        places = [_first_place(self._tiers, nbytes) for nbytes in (*sizes, *besides) if nbytes]
        for place in places:
            if place is not None:
                place.release()
        return None not in places

    def _claim(self, saved: SavedStorage, nbytes: int, tiers: Sequence[TierRoom]) -> Place:
        tiers = tiers if self._spill else tiers[:1]
        place = tiers[0].claim(nbytes)
        if place is None:
            self._make_room()
            place = _first_place(tiers, nbytes)
            if place is None:
                raise _no_room(saved, nbytes, tiers)
            self._stats.spilled += place.tier is not tiers[0]
        return place


def _first_place(tiers: Sequence[TierRoom], nbytes: int) -> Place | None:
    return next((place for tier in tiers if (place := tier.claim(nbytes)) is not None), None)


def _no_room(saved: SavedStorage, nbytes: int, tiers: Sequence[TierRoom]) -> SwapError:
    state = ", ".join(
        f"{tier.name} {format_bytes(tier.used)} used"
        + (f" of {format_bytes(tier.budget)}" if tier.budget is not None else "")
        for tier in tiers
    )
    kind = ScratchFull if tiers[-1].name is Tier.DISK else HostBudgetExceeded
    return kind(
        f"no room for {format_bytes(nbytes)} saved by {saved.module} ({state}); "
        f"raise the host or disk budget, or train on a shorter sequence"
    )
