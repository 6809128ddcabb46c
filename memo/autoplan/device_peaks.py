"""Peaks of device memory within one step, layer by layer: saved tensors, and everything else beside them.

The peak of all memory and that of saved tensors need not come together: logits exist after the layers have moved their
tensors, gradients when little is saved any more. So the difference of a whole step's two peaks is too small. Between
two layer boundaries one layer runs, or the code around the layers, and a plan changes saved tensors by a constant:
there the difference is the memory that must be left free.

    boundaries begin | end | begin | end  ...  backward reaches the last | the one before | ...  backward's end
    between    layer 0     | layer 1     head                            | layer 1        | layer 0           the optimizer

A layer's recompute is an interval of its own: what it holds depends on the plan, and gradients come after it.

Owns the peaks of one step, and keeps them where the program restarts the device's own counter. A settled step is looked at
without restarting that counter, which is then the program's: `forget` remembers what it showed, and a reading that is no
other tells of no step since.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memo.autoplan.device_budget import DeviceBudget
    from memo.swap import Stats


class Outside(enum.Enum):
    """A part of the step in which no layer runs."""

    LAYERS = enum.auto()
    """Before, after and between the layers; or all of the step, where layer boundaries are not observed."""
    BACKWARD = enum.auto()
    """After backward: nothing is saved, and nothing has to be left free."""
    TRIAL = enum.auto()
    """A trial recompute, which no later step repeats."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredRecompute:
    """The part of a layer's backward in which its recompute runs."""

    layer: str


Part = str | MeasuredRecompute | Outside
"""A part of the step: a layer's name is its forward and the rest of its backward."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPeaks:
    """Peaks of one step, in bytes; each may be at another time."""

    saved_bytes: int
    """Peak of saved tensors."""
    others: Mapping[Part, int]
    """Peak of everything else, by part."""
    absent: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Least bytes that were not there at the peaks of each layer's backward, of all that autograd saved, where the recompute
    ran in parts."""


class DevicePeaks:
    """Observes the peaks of one device, and of the engine's own count of saved tensors.

    Attributes:
        by_layer: layer boundaries are observed. Without, a step is one interval, and the program may restart the
            device's peak.
    """

    def __init__(self, budget: DeviceBudget, stats: Stats) -> None:
        self.by_layer = False
        self._budget = budget
        self._stats = stats
        self._where: Part = Outside.LAYERS
        self._tried: Part = Outside.LAYERS  # the part that a trial is in
        self._others: dict[Part, int] = {}
        self._absent_bytes: int | None = None  # of the layer in backward; None before its recompute, and outside
        self._with_absent: dict[Part, int] = {}  # `_others` in backward, less what was absent meanwhile
        self._divided: set[str] = set()  # layers of which something was absent
        self._peak_bytes = self._noted_bytes = self._saved_bytes = 0
        self._after_bytes = 0  # after backward
        self._backward_has_ended = False
        self._seen_device_bytes = self._seen_saved_bytes = -1  # readings that tell of no step since `forget`
        self.restart()

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use since the step began; saved tensors only where the device has no counter."""
        return max(self.planned_peak_bytes, self._after_bytes, self._read_device())

    @property
    def planned_peak_bytes(self) -> int:
        """Peak up to the end of the last backward: what a plan can make less."""
        saved = self._stats.recent_peak_bytes
        if saved == self._seen_saved_bytes:
            saved = 0
        now = 0 if self._backward_has_ended else max(self._noted_bytes, self._read_device())
        return max(self._peak_bytes, now, self._saved_bytes, saved)

    def note(self) -> None:
        """Reads the device's peak, which may be restarted after this call."""
        self._noted_bytes = max(self._noted_bytes, self._read_device())

    def _read_device(self) -> int:
        now = self._budget.peak_bytes()
        return 0 if now == self._seen_device_bytes else now

    def cross_boundary(self, begins: str | None) -> None:
        """Begins the interval of the named layer, or for None that around the layers."""
        self._begin(Outside.LAYERS if begins is None else begins)

    def cross_recompute(self, layer: str | None, begins: bool, absent_nbytes: int = 0) -> None:
        """Begins the interval of a layer's recompute, or that of the rest of its backward; for None of a trial.

        Args:
            layer: its name.
            begins: the recompute, or a part of it; False: it has ended.
            absent_nbytes: of what autograd saved of the layer, meanwhile and until the next part begins.
        """
        if layer is not None:
            if absent_nbytes:
                self._divided.add(layer)
            if self._absent_bytes is None:
                self._absent_bytes = absent_nbytes  # no less than now was absent since backward came to the layer
            self._begin(MeasuredRecompute(layer) if begins else layer, absent_nbytes)
        elif begins:
            self._tried = self._where
            self._begin(Outside.TRIAL)
        else:
            self._begin(self._tried)

    def end_backward(self) -> None:
        """Ends the last layer's interval; memory used from now on is the program's own."""
        if self.by_layer:
            self._begin(Outside.BACKWARD)
        else:
            self.note()
            self._peak_bytes = max(self._peak_bytes, self._noted_bytes)
        self._backward_has_ended = True

    def end_step(self) -> StepPeaks:
        """Returns the peaks of the step that has ended, and begins the next one."""
        self._begin(Outside.LAYERS)
        for part in (Outside.BACKWARD, Outside.TRIAL):
            self._others.pop(part, None)
        absent = {layer: self._absent_of(layer) for layer in self._divided}
        step = StepPeaks(saved_bytes=self._saved_bytes, others=self._others, absent=absent)
        self.restart()
        return step

    def _absent_of(self, layer: str) -> int:
        """Bytes by which all that a layer saved and the peak of everything else exceed what was there at any time."""
        return min(self._others[part] - self._with_absent[part] for part in (layer, MeasuredRecompute(layer)))

    def restart(self) -> None:
        """Forgets the peaks so far."""
        self._peak_bytes = self._noted_bytes = self._saved_bytes = 0
        self._where = Outside.LAYERS
        self._others, self._with_absent, self._absent_bytes, self._divided = {}, {}, None, set()
        self._after_bytes, self._backward_has_ended = 0, False
        self._seen_device_bytes = self._seen_saved_bytes = -1
        self._stats.restart_peak()
        self._budget.restart()

    def forget(self) -> None:
        """Forgets the peaks so far, and leaves the counters as they are: lower peaks than theirs are not seen."""
        self._peak_bytes = self._noted_bytes = self._saved_bytes = self._after_bytes = 0
        self._backward_has_ended = False
        self._seen_device_bytes, self._seen_saved_bytes = self._budget.peak_bytes(), self._stats.recent_peak_bytes

    def _begin(self, where: Part, absent_bytes: int | None = None) -> None:
        self.note()
        saved = self._stats.restart_peak()
        self._budget.restart()
        others = self._noted_bytes - saved
        self._others[self._where] = max(self._others.get(self._where, 0), others)
        if self._absent_bytes is not None:
            less = others - self._absent_bytes
            self._with_absent[self._where] = max(less, self._with_absent.get(self._where, less))
        self._absent_bytes = absent_bytes
        self._saved_bytes = max(self._saved_bytes, saved)
        if self._where is Outside.BACKWARD:
            self._after_bytes = max(self._after_bytes, self._noted_bytes)
        else:
            self._peak_bytes = max(self._peak_bytes, self._noted_bytes)
        self._noted_bytes = 0
        self._where = where
        self._backward_has_ended = False
