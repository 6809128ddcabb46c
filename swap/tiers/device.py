"""Device tier: copies of token prefixes that stay on the device while their storages' other tokens are recomputed.

A storage that is kept whole needs no place, it just stays. The source of a divided storage must be released for any memory
to be saved, so its prefix is copied. Both copies run on the caller's compute stream; where forward and backward have
different streams, events order them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.events import Lane, Tier as TierName

if TYPE_CHECKING:
    import torch

    from memo.swap.backends.protocol import Backend, Event, Timed
    from memo.swap.stats import Stats
    from memo.swap.tiers.protocol import Place, Tier

__all__ = ["DeviceTier"]


class DeviceTier:
    """A `memo.swap.tiers.protocol.Tier` without a budget; counts its bytes as the device's in `stats`."""

    name = TierName.DEVICE
    lane_out = lane_in = Lane.COMPUTE
    budget: int | None = None
    obtainable: int | None = None
    free: int | None = None
    refusal: str | None = None

    def __init__(self, backend: Backend, stats: Stats) -> None:
        self.backend = backend
        self.stats = stats
        self.used = 0
        self.peak = 0

    def claim(self, nbytes: int) -> Place | None:
        """Returns a place; its memory is allocated by the copy."""
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        self.stats.came_to_device(nbytes)
        return _DevicePlace(self, nbytes)

    def give_back(self, nbytes: int) -> None:
        """Counts the bytes of a released place."""
        self.used -= nbytes
        self.stats.device_bytes -= nbytes

    def expect(self, nbytes: int) -> None:
        """Does nothing: the device's allocator owns the memory."""

    def end_step(self) -> None:
        """Ends a step: nothing is held now."""
        self.used = 0

    def close(self) -> None:
        """Does nothing."""


class _DevicePlace:
    """A block of device memory, allocated by the copy into it."""

    __slots__ = ("_block", "_nbytes", "_tier", "_written")

    def __init__(self, tier: DeviceTier, nbytes: int) -> None:
        self._tier = tier
        self._nbytes = nbytes
        self._block: torch.Tensor | None = None
        self._written: Event | None = None

    @property
    def tier(self) -> Tier:
        return self._tier

    def copy_out(self, source: torch.Tensor, *, after: Event) -> Timed:
        backend = self._tier.backend
        self._block = backend.empty(self._nbytes)
        self._block.copy_(source)
        backend.compute_uses(self._block)
        written = self._written = backend.compute_event()
        return written

    def copy_in(self, target: torch.Tensor, *, after: Event) -> Timed:
        assert self._block is not None
        assert self._written is not None
        backend = self._tier.backend
        backend.compute_wait(self._written)
        target.copy_(self._block)
        backend.compute_uses(self._block)
        backend.compute_uses(target)
        self.release()  # a divided storage is reloaded only once
        return backend.compute_event()

    def release(self) -> None:
        nbytes, self._nbytes = self._nbytes, 0
        self._block = None  # None where its allocation failed
        self._tier.give_back(nbytes)
