"""Room on the device itself: where the first tokens of a storage stay whose other tokens are computed again.

A storage that is kept whole needs no room, it just stays. Of a divided one the source must go for any memory to be saved, so
what is kept of it is copied aside. Both copies run on the compute stream, in its order: there is nothing to wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.trace.events import Lane
from memo.trace.events import Tier as TierName

if TYPE_CHECKING:
    import torch

    from memo.swap.backend import Backend, Event, Timed
    from memo.swap.stats import Stats
    from memo.swap.tiers import Place, Tier

__all__ = ["DeviceTier"]


class _InOrder:
    """The end of what the compute stream was given: whoever uses it next comes after it."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False


_IN_ORDER = _InOrder()


class DeviceTier:
    """Satisfies `memo.swap.tiers.Tier`; has all the room there is, and counts it as the device's."""

    name = TierName.DEVICE
    lane_out = lane_in = Lane.COMPUTE
    budget: int | None = None

    def __init__(self, backend: Backend, stats: Stats) -> None:
        self.backend = backend
        self.stats = stats
        self.used = 0
        self.peak = 0

    def claim(self, nbytes: int) -> Place | None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        self.stats.came_to_device(nbytes)
        return _Aside(self, nbytes)

    def give_back(self, nbytes: int) -> None:
        self.used -= nbytes
        self.stats.device_bytes -= nbytes

    def end_step(self) -> None:
        return None

    def close(self) -> None:
        return None


class _Aside:
    __slots__ = ("_block", "_nbytes", "_tier")

    def __init__(self, tier: DeviceTier, nbytes: int) -> None:
        self._tier = tier
        self._nbytes = nbytes
        self._block: torch.Tensor | None = None

    @property
    def tier(self) -> Tier:
        return self._tier

    def leave(self, source: torch.Tensor, *, after: Event) -> Timed:
        self._block = self._tier.backend.empty(self._nbytes)
        self._block.copy_(source)
        self._tier.backend.compute_uses(self._block)
        return _IN_ORDER

    def enter(self, target: torch.Tensor, *, after: Event) -> Timed:
        assert self._block is not None
        target.copy_(self._block)
        self._tier.backend.compute_uses(self._block)
        return _IN_ORDER

    def release(self) -> None:
        self._block = None
        self._tier.give_back(self._nbytes)
