"""Rehearsal of a training on a GPU that is not here: memo's own engine, planner and tiers on a simulated machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.rehearsal.machine import SimulatedMachine as SimulatedMachine
    from memo.rehearsal.models import gpt_step_of_rank as gpt_step_of_rank, hugging_face_step as hugging_face_step
    from memo.rehearsal.pipeline import (
        RehearsedPipeline as RehearsedPipeline,
        rehearse_pipeline as rehearse_pipeline,
    )
    from memo.rehearsal.run import (
        Rehearsal as Rehearsal,
        RehearsedStep as RehearsedStep,
        Way as Way,
        rehearse as rehearse,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
