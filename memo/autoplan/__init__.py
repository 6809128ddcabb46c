"""Planning at run time: measures a program's own steps, solves for a plan, and applies it between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.autoplan.actuator import (
        Actuator as Actuator,
        saved_peak_bytes as saved_peak_bytes,
        settings_of as settings_of,
    )
    from memo.autoplan.controller import AutoPlan as AutoPlan
    from memo.autoplan.device_budget import (
        DeviceBudget as DeviceBudget,
        device_budget_of as device_budget_of,
        missing_gradient_bytes as missing_gradient_bytes,
    )
    from memo.autoplan.layer_classes import (
        classes_of as classes_of,
        mlp_tiles_of as mlp_tiles_of,
        points_of as points_of,
    )
    from memo.autoplan.plan_outcome import PlanOutcome as PlanOutcome
    from memo.autoplan.plan_source import PlanSource as PlanSource
    from memo.autoplan.profile_from_step import saved_alone as saved_alone
    from memo.autoplan.step_evidence import AllGather as AllGather, single_rank as single_rank
else:
    __getattr__, __dir__, __all__ = attach(__name__)
