"""How much device memory a step takes beside saved tensors: looked at from edge to edge of its layers.

The peak of all memory and that of saved tensors need not come together: logits stand when the layers have moved, gradients
when nothing is saved any more. Of a whole step their difference says too little. Between two edges one layer is all that
runs, or what stands around the layers, and what a plan changes of saved tensors is the same all the while: there the
difference is what has to be left free.

    edges      begin | end | begin | end  ...  backward reaches the last | the one before | ...  backward's end
    between    layer 0     | layer 1     head                            | layer 1        | layer 0           the optimizer

Owns the peaks of one step, and forgets none of them where the program restarts the device's own.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memo.autoplan.device_budget import DeviceBudget
    from memo.swap import Stats

__all__ = ["DevicePeaks", "Place", "StepUse"]


class Place(enum.Enum):
    """Where no layer runs."""

    AROUND = enum.auto()
    """Before, behind and between the layers; or anywhere, where nobody tells the edges."""
    BEYOND = enum.auto()
    """After backward: nothing is saved, and nothing has to be left free."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepUse:
    """The most that one step held, each at a time of its own."""

    saved_bytes: int
    """Of saved tensors."""
    others: Mapping[str | Place, int]
    """Beside them, while each layer ran and around them."""


class DevicePeaks:
    """Of one device, and the engine's ledger of it."""

    def __init__(self, memory: DeviceBudget, stats: Stats) -> None:
        self.has_edges = False
        """A step without is one interval, and the device's peak the program's to restart."""
        self._memory = memory
        self._stats = stats
        self._place: str | Place = Place.AROUND
        self._others: dict[str | Place, int] = {}
        self._peak_bytes = self._noted_bytes = self._saved_bytes = 0
        self.restart()

    @property
    def peak_bytes(self) -> int:
        """The most of everything since the step began; saved tensors alone where memory cannot be told."""
        device = max(self._peak_bytes, self._noted_bytes, self._memory.peak_bytes())
        return max(device, self._saved_bytes, self._stats.recent_peak_bytes)

    def note(self) -> None:
        """The device's peak may be restarted after this."""
        self._noted_bytes = max(self._noted_bytes, self._memory.peak_bytes())

    def edge(self, begins: str | None) -> None:
        """What comes now, the layer of this name or what is around them, is looked at apart from what was."""
        self._begin(Place.AROUND if begins is None else begins)

    def end_backward(self) -> None:
        """What comes now may be the program's own."""
        if self.has_edges:
            self._begin(Place.BEYOND)
        else:
            self.note()

    def end_step(self) -> StepUse:
        """Of the step that is over; the next one begins."""
        self._begin(Place.AROUND)
        self._others.pop(Place.BEYOND, None)
        step = StepUse(saved_bytes=self._saved_bytes, others=self._others)
        self.restart()
        return step

    def restart(self) -> None:
        """Forgets what was used before."""
        self._peak_bytes = self._noted_bytes = self._saved_bytes = 0
        self._place = Place.AROUND
        self._others = {}
        self._stats.restart_peak()
        self._memory.restart()

    def _begin(self, place: str | Place) -> None:
        self.note()
        saved = self._stats.restart_peak()
        self._memory.restart()
        self._others[self._place] = max(self._others.get(self._place, 0), self._noted_bytes - saved)
        self._saved_bytes = max(self._saved_bytes, saved)
        self._peak_bytes = max(self._peak_bytes, self._noted_bytes)
        self._noted_bytes = 0
        self._place = place
