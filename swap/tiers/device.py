"""Room on the device itself: where the first tokens of a storage stay whose other tokens are computed again.

A storage that is kept whole needs no room, it just stays. Of a divided one the source must go for any memory to be saved, so
what is kept of it is copied aside. Both copies run on the compute stream of whoever asks; where forward and backward have
different ones, events order them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.events import Lane, Tier as TierName

if TYPE_CHECKING:
    import torch

    from memo.swap.backends.protocol import Backend, Event, Timed
    from memo.swap.stats import Stats
    from memo.swap.tiers.host_and_disk import Place, Tier

__all__ = ["DeviceTier"]


class DeviceTier:
    """Satisfies `memo.swap.tiers.host_and_disk.Tier`; has all the room there is, and counts it as the device's."""

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

    def expect(self, nbytes: int) -> None:
        return None

    def end_step(self) -> None:
        return None

    def close(self) -> None:
        return None


class _Aside:
    __slots__ = ("_block", "_nbytes", "_tier", "_written")

    def __init__(self, tier: DeviceTier, nbytes: int) -> None:
        self._tier = tier
        self._nbytes = nbytes
        self._block: torch.Tensor | None = None
        self._written: Event | None = None

    @property
    def tier(self) -> Tier:
        return self._tier

    def leave(self, source: torch.Tensor, *, after: Event) -> Timed:
        backend = self._tier.backend
        self._block = backend.empty(self._nbytes)
        self._block.copy_(source)
        backend.compute_uses(self._block)
        written = self._written = backend.compute_event()
        return written

    def enter(self, target: torch.Tensor, *, after: Event) -> Timed:
        assert self._block is not None
        assert self._written is not None
        backend = self._tier.backend
        backend.compute_wait(self._written)
        target.copy_(self._block)
        backend.compute_uses(self._block)
        backend.compute_uses(target)
        self.release()  # once is enough: what is divided comes back for good
        return backend.compute_event()

    def release(self) -> None:
        nbytes, self._nbytes = self._nbytes, 0
        self._block = None  # never there where the device had no room for it
        self._tier.give_back(nbytes)
