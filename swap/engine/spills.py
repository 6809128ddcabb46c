"""Bytes that a tier had no room for, by step and layer, and the mean that each layer saves.

A layer that gets more rows than usual, as the experts of one rank may, saves more than there is room for. Owns the figures
of it: which tier was full, what became of the bytes, and how many times its mean the layer saved.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import TYPE_CHECKING

from memo.events import TierName
from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.swap.engine.layer_calls import Group


class SpillOutcome(enum.Enum):
    """What became of bytes that a tier had no room for."""

    SPILLED = enum.auto()
    """Another tier took them."""
    STAYED = enum.auto()
    """No tier took them; they stayed on the device."""
    RECOMPUTED = enum.auto()
    """No tier took them; their layer was recomputed whole."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpill:
    """Bytes of one layer in one step with one outcome."""

    module: str
    nbytes: int
    full: TierName
    """The tier that had no room."""
    tier: TierName | None
    """The tier that took the bytes, of several the last one; None: the layer is recomputed."""
    saved_nbytes: int
    """Bytes that its call saved, spilled or not."""
    usual_nbytes: float
    """Mean bytes that its earlier calls saved; 0: there was none."""

    @property
    def outcome(self) -> SpillOutcome:
        """What became of the bytes."""
        if self.tier is None:
            return SpillOutcome.RECOMPUTED
        return SpillOutcome.STAYED if self.tier is TierName.DEVICE else SpillOutcome.SPILLED

    def __str__(self) -> str:
        usual = f", {self.saved_nbytes / self.usual_nbytes:.2g} times its mean" if self.usual_nbytes else ""
        became = {
            SpillOutcome.SPILLED: f" and went to the {self.tier} tier",
            SpillOutcome.STAYED: " and stayed on the device",
            SpillOutcome.RECOMPUTED: ", so the layer is recomputed",
        }
        return (
            f"{self.module} saved {format_bytes(self.saved_nbytes)}{usual}: {format_bytes(self.nbytes)} found no room in "
            f"the {self.full} tier{became[self.outcome]}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSpill:
    """Bytes of one step with one outcome."""

    step: int
    nbytes: int
    layer: LayerSpill
    """The layer with the most of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpillFigures:
    """Bytes of an engine with one outcome so far."""

    nbytes: int
    steps: int
    """Number of steps with such bytes."""
    layers: int
    """Number of layers with such bytes in any step."""
    worst: StepSpill
    """The step with the most of them."""


@dataclasses.dataclass(slots=True)
class _Total:
    """Bytes with one outcome; the steps are those that have ended."""

    nbytes: int = 0
    steps: int = 0
    worst: StepSpill | None = None
    layers: set[str] = dataclasses.field(default_factory=set)
    now: dict[str, LayerSpill] = dataclasses.field(default_factory=dict)
    """In the step under way, by layer."""

    def worst_with(self, step: int) -> StepSpill | None:
        """The worst step, the one under way among them."""
        nbytes = sum(layer.nbytes for layer in self.now.values())
        if not self.now or (self.worst is not None and self.worst.nbytes >= nbytes):
            return self.worst
        return StepSpill(step=step, nbytes=nbytes, layer=max(self.now.values(), key=lambda layer: layer.nbytes))


class Spills:
    """Bytes of one engine that found no room in their tier; callers hold its lock."""

    def __init__(self) -> None:
        self._totals = {outcome: _Total() for outcome in SpillOutcome}
        self._lacking: collections.Counter[TierName] = collections.Counter()  # since `take_lacking`
        self._usual: dict[str, tuple[int, int]] = {}  # layer -> its calls so far, and the bytes that they saved

    def add(self, group: Group, nbytes: int, full: TierName, tier: TierName | None) -> None:
        """Counts bytes of a layer's call that the tier `full` had no room for; `tier` took them, or None: recomputed."""
        calls, total = self._usual.get(group.module, (0, 0))
        if group.has_ended:  # its own bytes are in the mean already
            calls, total = calls - 1, total - group.nbytes
        layer = LayerSpill(
            module=group.module,
            nbytes=nbytes,
            full=full,
            tier=tier,
            saved_nbytes=group.nbytes,
            usual_nbytes=total / calls if calls else 0.0,
        )
        if layer.outcome is not SpillOutcome.SPILLED:
            self._lacking[full] += nbytes
        same = self._totals[layer.outcome]
        same.nbytes += nbytes
        same.layers.add(group.module)
        before = same.now.get(group.module)
        if before is not None:
            saved_nbytes = max(group.nbytes, before.saved_nbytes)
            layer = dataclasses.replace(layer, nbytes=nbytes + before.nbytes, saved_nbytes=saved_nbytes)
        same.now[group.module] = layer

    def layer_ended(self, group: Group) -> None:
        """Counts what a layer's call has saved."""
        calls, total = self._usual.get(group.module, (0, 0))
        self._usual[group.module] = calls + 1, total + group.nbytes
        group.has_ended = True

    def end_step(self, step: int) -> list[LayerSpill]:
        """Ends a step; returns what each layer had no room for in it."""
        ended: list[LayerSpill] = []
        for same in self._totals.values():
            if same.now:
                same.worst = same.worst_with(step)
                same.steps += 1
                ended += same.now.values()
                same.now.clear()
        return ended

    def take_lacking(self) -> dict[TierName, int]:
        """Bytes by the full tier that no tier took since the last call: they stayed, or their layer was recomputed."""
        lacking, self._lacking = dict(self._lacking), collections.Counter()
        return lacking

    def figures(self, step: int) -> dict[SpillOutcome, SpillFigures]:
        """Figures of each outcome so far, those of the step under way, `step`, among them; none where there were none."""
        return {
            outcome: SpillFigures(
                nbytes=same.nbytes, steps=same.steps + bool(same.now), layers=len(same.layers), worst=worst
            )
            for outcome, same in self._totals.items()
            if (worst := same.worst_with(step)) is not None
        }

    @property
    def is_spilling(self) -> bool:
        """True where a tier was full in the step under way."""
        return any(same.now for same in self._totals.values())
