"""Placement of a layer's saved bytes, as fractions: kept on the device, sent to the host, sent to disk.

A storage goes to one place whole, so fractions hold to within one storage, that of the device from below. It owns the
running account of one layer call and nothing of how bytes move. What is still to come of a call is not known while its
storages are saved; the layer's previous call tells.
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
    """Fractions of the bytes that a layer saves; they add up to 1.

    What is computed again instead belongs to none of them.
    """

    kept: float = 0.0
    """Stays on the device until backward is through with it: no copy, no wait."""
    host: float = 0.0
    disk: float = 0.0
    nbytes: int = 0
    """What the layer's first call is expected to save; 0 where nobody knows."""
    begins: bool = False
    """A pass begins with this layer, also where the layer before it ran just now: that one is held for another time."""

    def __post_init__(self) -> None:
        fractions = (self.kept, self.host, self.disk)
        if not all(math.isfinite(part) and -_TOLERANCE <= part <= 1 + _TOLERANCE for part in fractions):
            raise UsageError(f"placement: {fractions} are no fractions")
        if abs(sum(fractions) - 1) > _TOLERANCE:
            raise UsageError(f"placement: {fractions} do not add up to 1")

    @property
    def fractions(self) -> dict[Tier, float]:
        return {Tier.DEVICE: self.kept, Tier.HOST: self.host, Tier.DISK: self.disk}


class Quota:
    """One layer call's account: each storage goes where most is missing of what the placement says.

    With the call's true total known in advance each tier ends within its largest storage of its fraction, and the device
    never above it: what is kept is what a hard budget was divided by. `carried_nbytes` is what the layers before this one
    kept too little for that reason; it may be kept here. Without the total, in a layer's first call, fractions are kept of
    what has been saved so far. A call that saves less than the one before it may be off by as much more as it saves less.
    """

    __slots__ = ("_owed", "expected_nbytes", "missing", "nbytes", "placement")

    def __init__(self, placement: Placement, *, expected_nbytes: int = 0, carried_nbytes: float = 0.0) -> None:
        self.placement = placement
        self.expected_nbytes = expected_nbytes
        self.nbytes = 0
        """Bytes placed so far."""
        self.missing = {
            tier: fraction * expected_nbytes for tier, fraction in placement.fractions.items() if fraction > _TOLERANCE
        }
        """Bytes that each tier should still get; below zero where it has more than its share."""
        self._owed = carried_nbytes  # to the device, by layers before this one
        if Tier.DEVICE in self.missing:
            self.missing[Tier.DEVICE] += carried_nbytes
            self._owed = 0.0

    def choose(self, nbytes: int) -> Tier:
        """Where the next storage goes; it is counted there, wherever it then finds room."""
        beyond = self.nbytes + nbytes - max(self.nbytes, self.expected_nbytes)
        if beyond > 0:  # more than was expected: every tier is to get its share of that too
            for tier in self.missing:
                self.missing[tier] += self.placement.fractions[tier] * beyond
        chosen = max(self._open_to(nbytes), key=self.missing.__getitem__)  # the first of equals: device, host, disk
        self.missing[chosen] -= nbytes
        self.nbytes += nbytes
        return chosen

    def _open_to(self, nbytes: int) -> Iterable[Tier]:
        """All but the device where it would hold more than it should."""
        kept = self.missing.get(Tier.DEVICE)
        if kept is None or nbytes <= kept + _TOLERANCE * nbytes or len(self.missing) == 1:
            return self.missing
        return [tier for tier in self.missing if tier is not Tier.DEVICE]

    def keeps_instead(self, of: Tier, nbytes: int) -> None:
        """What was to go to a tier stays on the device."""
        self.missing[of] += nbytes
        if Tier.DEVICE in self.missing:
            self.missing[Tier.DEVICE] -= nbytes
        else:
            self._owed -= nbytes

    @property
    def unkept_nbytes(self) -> float:
        """What the device holds less than it should: carried on to the next layer, also through one that keeps nothing."""
        return max(0.0, self.missing.get(Tier.DEVICE, self._owed))

    def copy(self) -> Quota:
        """An account to try things out on."""
        twin = Quota(self.placement, expected_nbytes=self.expected_nbytes)
        twin.nbytes = self.nbytes
        twin.missing = dict(self.missing)
        twin._owed = self._owed
        return twin
