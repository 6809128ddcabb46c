"""Placement of a layer's saved bytes, as fractions kept on the device, sent to host memory and sent to disk.

A storage goes to one tier whole, so fractions hold to within one storage over a whole pass, and the device never gets more
than its fraction. It owns the quota of one layer call, not the transfers. The bytes that a call is still to save are not
known while it runs; those of the layer's previous call are taken as the estimate.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.events import TierName

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    late_nbytes: int = 0
    """Bytes on their way out that the device has room for until the layer after the next one has run."""
    begins: bool = False
    """A pass begins with this layer, also where the layer before it ran just now: that one's storages live longer."""

    def __post_init__(self) -> None:
        fractions = (self.kept, self.host, self.disk)
        if not all(math.isfinite(part) and -_TOLERANCE <= part <= 1 + _TOLERANCE for part in fractions):
            raise UsageError(f"placement: {fractions} are not fractions from 0 to 1")
        if abs(sum(fractions) - 1) > _TOLERANCE:
            raise UsageError(f"placement: {fractions} do not sum to 1")

    @property
    def fractions(self) -> dict[TierName, float]:
        """Fractions by tier."""
        return {TierName.DEVICE: self.kept, TierName.HOST: self.host, TierName.DISK: self.disk}


class Quota:
    """Bytes of one layer call due to each tier, with what the layers before it in the pass left over.

    A storage is kept where the device still lacks as much, and lacks more than the other tiers together; otherwise the
    other tier that lacks most gets it. With exact estimates, after any layer of a pass:

        kept by the device      at most its share, since a hard budget was divided by what is kept
        sent to a tier          less than one storage more than its share; so are those sent to all tiers together

    The tiers together lack the bytes still to come: where the device cannot take a storage, another tier lacks some.
    Without an estimate, in a layer's first call, fractions are of the bytes saved so far.

    Args:
        placement: fractions of each tier.
        expected_nbytes: estimate of the call's total; 0: unknown.
        carried: bytes that each tier lacks of its share of earlier layers; negative where it has more.
    """

    __slots__ = ("expected_nbytes", "missing", "nbytes", "placement")

    def __init__(
        self, placement: Placement, *, expected_nbytes: int = 0, carried: Mapping[TierName, float] | None = None
    ) -> None:
        self.placement = placement
        self.expected_nbytes = expected_nbytes
        self.nbytes = 0
        """Bytes placed so far."""
        self.missing = dict(carried or {})
        """Bytes that each tier should still get; negative where it has more than its share."""
        for tier, fraction in placement.fractions.items():
            if fraction > _TOLERANCE:
                self.missing[tier] = self.missing.get(tier, 0.0) + fraction * expected_nbytes

    def choose(self, nbytes: int) -> TierName:
        """Chooses the tier of the next storage and counts it there, wherever it then finds room."""
        missing = self.missing
        beyond = self.nbytes + nbytes - max(self.nbytes, self.expected_nbytes)
        if beyond > 0:  # more than expected: every tier gets its share of that too
            for tier, fraction in self.placement.fractions.items():
                if fraction > _TOLERANCE:
                    missing[tier] += fraction * beyond
        chosen = TierName.DEVICE
        kept, others = missing.get(chosen, 0.0), [tier for tier in (TierName.HOST, TierName.DISK) if tier in missing]
        if others and (kept + _TOLERANCE * nbytes < nbytes or kept < sum(map(missing.__getitem__, others))):
            chosen = max(others, key=missing.__getitem__)  # the first of equals
        missing[chosen] -= nbytes
        self.nbytes += nbytes
        return chosen

    def keeps_instead(self, of: TierName, nbytes: int) -> None:
        """Moves a storage's count from the tier `of` to the device, where it stays for lack of room."""
        self.missing[of] += nbytes
        self.missing[TierName.DEVICE] = self.missing.get(TierName.DEVICE, 0.0) - nbytes

    @property
    def unkept_nbytes(self) -> float:
        """Bytes that the device holds below its share."""
        return max(0.0, self.missing.get(TierName.DEVICE, 0.0))

    @property
    def carried(self) -> dict[TierName, float]:
        """Bytes that each tier lacks after this call, for the next layer; they sum to 0.

        Bytes that were expected and never saved are due to no tier: those that still lack some go without.
        """
        unsaved = max(0, self.expected_nbytes - self.nbytes)
        lacking = sum(nbytes for nbytes in self.missing.values() if nbytes > 0)
        rest = 1.0 - min(1.0, unsaved / lacking) if lacking else 1.0
        return {tier: nbytes * rest if nbytes > 0 else nbytes for tier, nbytes in self.missing.items()}

    def copy(self) -> Quota:
        """Returns an independent copy, for a trial."""
        other = Quota(self.placement, expected_nbytes=self.expected_nbytes)
        other.nbytes = self.nbytes
        other.missing = dict(self.missing)
        return other
