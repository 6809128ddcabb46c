"""Spills: bytes that one tier had no room for and another one took, by step and layer, and the mean that each layer saves.

A layer that gets more rows than usual, as the experts of one rank may, saves more than there is room for. Owns the figures
of it: which tier was full, which one took the bytes, and how many times its mean the layer saved.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.units import format_bytes

if TYPE_CHECKING:
    from memo.events import Tier
    from memo.swap.engine.layer_calls import Group

__all__ = ["LayerSpill", "SpillFigures", "Spills", "StepSpill"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpill:
    """What one layer spilled in one step."""

    module: str
    nbytes: int
    full: Tier
    """The tier that had no room."""
    tier: Tier
    """The tier that took the bytes; of several the last one."""
    saved_nbytes: int
    """Bytes that its call saved, spilled or not."""
    usual_nbytes: float
    """Mean bytes that its earlier calls saved; 0: there was none."""

    def __str__(self) -> str:
        usual = f", {self.saved_nbytes / self.usual_nbytes:.2g} times its mean" if self.usual_nbytes else ""
        return (
            f"{self.module} saved {format_bytes(self.saved_nbytes)}{usual}: {format_bytes(self.nbytes)} found no room in "
            f"the {self.full} tier and went to the {self.tier} tier"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSpill:
    """Spill of one step."""

    step: int
    nbytes: int
    layer: LayerSpill
    """The layer that spilled most."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpillFigures:
    """Spills of an engine so far."""

    nbytes: int
    steps: int
    """Number of steps that spilled."""
    worst: StepSpill
    """The step that spilled most."""


class Spills:
    """Spills of one engine; callers hold its lock."""

    def __init__(self) -> None:
        self._nbytes = 0  # so far
        self._steps = 0  # that have ended and spilled
        self._worst: StepSpill | None = None  # of these
        self._now: dict[str, LayerSpill] = {}  # in the step under way, by layer
        self._usual: dict[str, tuple[int, int]] = {}  # layer -> its calls so far, and the bytes that they saved

    def add(self, group: Group, nbytes: int, full: Tier, tier: Tier) -> None:
        """Counts bytes of a layer's call that the tier `full` had no room for."""
        self._nbytes += nbytes
        before = self._now.get(group.module)
        calls, total = self._usual.get(group.module, (0, 0))
        if group.has_ended:  # its own bytes are in the mean already
            calls, total = calls - 1, total - group.nbytes
        self._now[group.module] = LayerSpill(
            module=group.module,
            nbytes=nbytes + (0 if before is None else before.nbytes),
            full=full,
            tier=tier,
            saved_nbytes=group.nbytes if before is None else max(group.nbytes, before.saved_nbytes),
            usual_nbytes=total / calls if calls else 0.0,
        )

    def layer_ended(self, group: Group) -> None:
        """Counts what a layer's call has saved."""
        calls, total = self._usual.get(group.module, (0, 0))
        self._usual[group.module] = calls + 1, total + group.nbytes
        group.has_ended = True

    def end_step(self, step: int) -> list[LayerSpill]:
        """Ends a step; returns what each layer spilled in it."""
        ended = list(self._now.values())
        if ended:
            self._worst = self._worst_with(step)
            self._steps += 1
            self._now.clear()
        return ended

    def figures(self, step: int) -> SpillFigures | None:
        """Spills so far, those of the step under way, `step`, among them; None where there were none."""
        worst = self._worst_with(step)
        if worst is None:
            return None
        return SpillFigures(nbytes=self._nbytes, steps=self._steps + self.is_spilling, worst=worst)

    @property
    def is_spilling(self) -> bool:
        """True where the step under way has spilled."""
        return bool(self._now)

    def _worst_with(self, step: int) -> StepSpill | None:
        nbytes = sum(layer.nbytes for layer in self._now.values())
        if not self._now or (self._worst is not None and self._worst.nbytes >= nbytes):
            return self._worst
        return StepSpill(step=step, nbytes=nbytes, layer=max(self._now.values(), key=lambda layer: layer.nbytes))
