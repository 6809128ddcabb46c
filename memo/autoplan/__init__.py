"""Planning while a program trains: measures its own steps, solves, and applies the plan between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.autoplan.actuator import Actuator as Actuator
    from memo.autoplan.controller import AutoPlan as AutoPlan
    from memo.autoplan.device_budget import device_memory as device_memory, gradients_to_come as gradients_to_come
    from memo.autoplan.layer_classes import (
        classes_of as classes_of,
        levels_of as levels_of,
        mlp_tiles_of as mlp_tiles_of,
    )
    from memo.autoplan.plan_outcome import PlanOutcome as PlanOutcome
    from memo.autoplan.step_evidence import Everyones as Everyones, alone as alone
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "actuator": "Actuator",
            "controller": "AutoPlan",
            "device_budget": "device_memory gradients_to_come",
            "layer_classes": "classes_of levels_of mlp_tiles_of",
            "plan_outcome": "PlanOutcome",
            "step_evidence": "Everyones alone",
        },
    )
