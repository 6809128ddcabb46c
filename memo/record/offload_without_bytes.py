"""The engine of `memo.offload` over byteless tensors: decisions and lifetimes are the real ones, but nothing is copied.

The host is the device's compute stream, as on a CPU. Copies are done when they are issued, and their tier is unbounded
and counts bytes. So the recording is of a run whose copies keep up with compute; with a slower link buffers live
longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.events import Lane, TierName as TierName
from memo.manager import Manager
from memo.swap import Engine, RecomputePolicy, setting_of
from memo.swap.backends import Done, OneComputeStream
from memo.swap.tiers import Extent, Tier
from memo.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from memo.swap import Layer, Rates
    from memo.swap.backends import Event, HostSlab

MIN_BYTES = parse_bytes("64KiB")
"""Default of `memo.offload`."""


class OffloadWithoutBytes:
    """A Manager over an unbounded tier that stores nothing.

    Args:
        model: a model on byteless tensors.
        layers: its repeated layers.
        alpha: as of `memo.offload`.
        min_bytes: as of `memo.offload`.
        rates: of a device that is not here, from which the costs of recompute follow; None times the trials.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        alpha: float,
        *,
        min_bytes: int = MIN_BYTES,
        rates: Rates | None = None,
    ) -> None:
        self._tier = _UnboundedTier(budget=None)
        self.engine = Engine(_BytelessBackend(), [self._tier], min_bytes=min_bytes)
        self.tapes = RecomputePolicy(self.engine, setting_of(alpha), rates=rates)
        self.manager = Manager(model, layers, self.engine, recompute_policy=self.tapes)

    @property
    def moved_nbytes(self) -> int:
        """Bytes copied out of the device so far."""
        return self.manager.stats.bytes_host

    @property
    def peak_away_nbytes(self) -> int:
        """Most bytes in the tier at one time."""
        return self._tier.peak

    @property
    def whole_layers(self) -> dict[str, str]:
        """Layers that move whole tensors although alpha is below 1, and the reason of each."""
        use = self.manager.report().recompute
        return {} if use is None else dict(use.refused)


_DONE = Done()


class _UnboundedTier(Tier):
    """A tier that counts bytes and stores none."""

    name = TierName.HOST
    lane_out = Lane.D2H
    lane_in = Lane.H2D

    def reserve(self, nbytes: int) -> Extent:
        return self._count(Extent(self, nbytes))

    def write(self, extent: Extent, source: torch.Tensor, *, after: Event) -> Done:
        return _DONE

    def read(self, extent: Extent, target: torch.Tensor, *, after: Event) -> Done:
        return _DONE


class _Stream:
    """A copy stream whose copies are done when issued."""

    def wait(self, event: Event) -> None:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Done:
        return _DONE


class _BytelessBackend(OneComputeStream):
    """A CPU backend whose copies take no time and move nothing."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.d2h = _Stream()
        self.h2d = _Stream()

    def compute_event(self, stream: int | None = None) -> Done:
        return _DONE

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        return None

    def would_block(self, event: Event) -> bool:
        return False

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_slab(self, nbytes: int) -> HostSlab:
        raise AssertionError("the tier stores nothing")

    def synchronize(self) -> None:
        return None

    def stamp(self, stream: int | None = None) -> None:
        return None  # times are not measured

    def close(self) -> None:
        return None
