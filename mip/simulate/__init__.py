"""Simulation of a training step under an activation plan, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.mip.activation.proof import agrees as agrees, play as play, verify_by_simulation as verify_by_simulation
    from memo.mip.activation.simulator import simulate as simulate
    from memo.mip.simulate.result import (
        Peak as Peak,
        Simulation as Simulation,
        StageSimulation as StageSimulation,
        Wait as Wait,
    )
    from memo.mip.simulate.trace_events import stage_events as stage_events
else:
    __getattr__, __dir__, __all__ = attach(__name__)
