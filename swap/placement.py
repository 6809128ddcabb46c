"""Placement of a layer's saved bytes, as fractions kept on the device, sent to host memory and sent to disk.

A storage goes to one tier whole, so fractions hold to within one storage, and the device never gets more than its fraction.
It owns the quota of one layer call, not the transfers. The bytes that a call is still to save are not known while it runs;
those of the layer's previous call are taken as the estimate.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.events import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Placement", "Quota"]

_TOLERANCE = 1e-6  # of a solver's fractions that should add up to 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Fractions of the bytes that a layer saves; they sum to 1. Recomputed bytes are not counted.

    Raises:
        UsageError: a fraction is not from 0 to 1, or they do not sum to 1.
    """

    kept: float = 0.0
    """Stays on the device until backward has used it: no copy, no wait."""
    host: float = 0.0
    disk: float = 0.0
    nbytes: int = 0
    """Bytes that the layer's first call is expected to save; 0: unknown."""
    begins: bool = False
    """A pass begins with this layer, also where the layer before it ran just now: that one's storages live longer."""

    def __post_init__(self) -> None:
        fractions = (self.kept, self.host, self.disk)
        if not all(math.isfinite(part) and -_TOLERANCE <= part <= 1 + _TOLERANCE for part in fractions):
            raise UsageError(f"placement: {fractions} are not fractions from 0 to 1")
        if abs(sum(fractions) - 1) > _TOLERANCE:
            raise UsageError(f"placement: {fractions} do not sum to 1")

    @property
    def fractions(self) -> dict[Tier, float]:
        """Fractions by tier."""
        return {Tier.DEVICE: self.kept, Tier.HOST: self.host, Tier.DISK: self.disk}


class Quota:
    """Bytes of one layer call due to each tier: a storage goes to the tier that is furthest below its fraction.

    Where the estimate of the call's total is exact, each tier ends within its largest storage of its fraction, and the
    device never above it, since a hard budget was divided by what is kept. Without an estimate, in a layer's first call,
    fractions are of the bytes saved so far. A call that saves less than its estimate may be off by as much more.

    Args:
        placement: fractions of each tier.
        expected_nbytes: estimate of the call's total; 0: unknown.
        carried_nbytes: bytes that earlier layers kept too few, which may be kept here.
    """

    __slots__ = ("_device_deficit", "expected_nbytes", "missing", "nbytes", "placement")

    def __init__(self, placement: Placement, *, expected_nbytes: int = 0, carried_nbytes: float = 0.0) -> None:
        self.placement = placement
        self.expected_nbytes = expected_nbytes
        self.nbytes = 0
        """Bytes placed so far."""
        self.missing = {
            tier: fraction * expected_nbytes for tier, fraction in placement.fractions.items() if fraction > _TOLERANCE
        }
        """Bytes that each tier should still get; negative where it has more than its share."""
        self._device_deficit = carried_nbytes  # of earlier layers, where this one keeps nothing
        if Tier.DEVICE in self.missing:
            self.missing[Tier.DEVICE] += carried_nbytes
            self._device_deficit = 0.0

    def choose(self, nbytes: int) -> Tier:
        """Chooses the tier of the next storage and counts it there, wherever it then finds room."""
        beyond = self.nbytes + nbytes - max(self.nbytes, self.expected_nbytes)
        if beyond > 0:  # more than expected: every tier gets its share of that too
            for tier in self.missing:
                self.missing[tier] += self.placement.fractions[tier] * beyond
        chosen = max(self._candidates(nbytes), key=self.missing.__getitem__)  # the first of equals: device, host, disk
        self.missing[chosen] -= nbytes
        self.nbytes += nbytes
        return chosen

    def _candidates(self, nbytes: int) -> Iterable[Tier]:
        """Tiers that may take a storage: the device not if that would exceed its share."""
        kept = self.missing.get(Tier.DEVICE)
        if kept is None or nbytes <= kept + _TOLERANCE * nbytes or len(self.missing) == 1:
            return self.missing
        return [tier for tier in self.missing if tier is not Tier.DEVICE]

    def keeps_instead(self, of: Tier, nbytes: int) -> None:
        """Moves a storage's count from the tier `of` to the device, where it stays for lack of room."""
        self.missing[of] += nbytes
        if Tier.DEVICE in self.missing:
            self.missing[Tier.DEVICE] -= nbytes
        else:
            self._device_deficit -= nbytes

    @property
    def unkept_nbytes(self) -> float:
        """Bytes that the device holds below its share: carried on to the next layer, also by one that keeps nothing."""
        return max(0.0, self.missing.get(Tier.DEVICE, self._device_deficit))

    def copy(self) -> Quota:
        """Returns an independent copy, for a trial."""
        other = Quota(self.placement, expected_nbytes=self.expected_nbytes)
        other.nbytes = self.nbytes
        other.missing = dict(self.missing)
        other._device_deficit = self._device_deficit
        return other
