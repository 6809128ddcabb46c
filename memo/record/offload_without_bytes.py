"""memo.offload's own engine over hollow tensors: every decision and every lifetime is the real one, only nothing is copied.

The device's compute stream is the host, as on a CPU. Copies are over as soon as they are issued, and the tier they go to has
all the room there is and keeps the count. So what is recorded is the order of a run whose copies keep up; buffers that wait
for a slower link live longer on a real machine.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from memo.events import Lane, Tier as TierName
from memo.manager import Manager
from memo.swap import Engine, TokenLevels, TokenWise
from memo.swap.backends import Done, OneComputeStream
from memo.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from memo.swap import Layer
    from memo.swap.backends import Event, HostSlab

__all__ = ["OffloadWithoutBytes"]

MIN_BYTES = parse_bytes("64KiB")  # memo.offload's default


class OffloadWithoutBytes:
    """A manager whose tier is nowhere."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], alpha: float) -> None:
        self._tier = _Nowhere()
        engine = Engine(_Lanes(), [self._tier], min_bytes=MIN_BYTES)
        self.manager = Manager(model, layers, engine, tokenwise=TokenWise(engine, TokenLevels.of_alpha(alpha)))

    @property
    def moved_nbytes(self) -> int:
        """All bytes that have left the device so far."""
        return self.manager.stats.bytes_host

    @property
    def peak_away_nbytes(self) -> int:
        """The most that was away at one time."""
        return self._tier.peak

    @property
    def whole_layers(self) -> dict[str, str]:
        """Layers that move whole tensors though alpha is below 1, and why."""
        use = self.manager.report().tokenwise
        return {} if use is None else dict(use.refused)


class _Copied(Done):
    """A copy, over since it began."""

    def interval_ns(self) -> tuple[int, int] | None:
        return None

    def cancel(self) -> bool:
        return False


_COPIED = _Copied()


@dataclasses.dataclass(slots=True)
class _Place:
    """Room for one storage."""

    tier: _Nowhere
    nbytes: int

    def copy_out(self, source: torch.Tensor, *, after: Event) -> _Copied:
        return _COPIED

    def copy_in(self, target: torch.Tensor, *, after: Event) -> _Copied:
        return _COPIED

    def release(self) -> None:
        self.tier.used -= self.nbytes


class _Nowhere:
    """A tier with room for everything, which holds nothing."""

    name = TierName.HOST
    lane_out = Lane.D2H
    lane_in = Lane.H2D
    budget: int | None = None

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0

    def claim(self, nbytes: int) -> _Place:
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return _Place(self, nbytes)

    def expect(self, nbytes: int) -> None:
        return None

    def end_step(self) -> None:
        return None

    def close(self) -> None:
        return None


class _Stream:
    def wait(self, event: Event) -> None:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> _Copied:
        return _COPIED


class _Lanes(OneComputeStream):
    """The backend: a device that is the CPU, with lanes on which nothing takes time."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.d2h = _Stream()
        self.h2d = _Stream()

    def compute_event(self, stream: int | None = None) -> _Copied:
        return _COPIED

    def compute_wait(self, event: Event, stream: int | None = None) -> None:
        return None

    def would_block(self, event: Event) -> bool:
        return False

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_slab(self, nbytes: int) -> HostSlab:
        raise AssertionError("no tier here has memory")

    def synchronize(self) -> None:
        return None

    def stamp(self, stream: int | None = None) -> None:
        return None  # nothing takes time

    def close(self) -> None:
        return None
