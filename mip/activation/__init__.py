"""Activation planning: what is kept, moved and recomputed, by a mixed-integer program; its cost and its checker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.mip.activation.checker import check_plan as check_plan, require_valid as require_valid
    from memo.mip.activation.cost import predict as predict
    from memo.mip.activation.files import (
        plan_to_json as plan_to_json,
        profile_to_json as profile_to_json,
        read_activation_plan as read_activation_plan,
        read_either_plan as read_either_plan,
        read_hardware as read_hardware,
        read_profile as read_profile,
    )
    from memo.mip.activation.free_swap_length import crossover_tokens as crossover_tokens
    from memo.mip.activation.in_flight import holds_no_more as holds_no_more, most_held as most_held
    from memo.mip.activation.memory_peaks import device_positions as device_positions
    from memo.mip.activation.mlp_tiles import TILES as TILES, solve_tiles as solve_tiles
    from memo.mip.activation.plan import (
        ActivationPlan as ActivationPlan,
        ActivationProblem as ActivationProblem,
        Budgets as Budgets,
        LayerPlan as LayerPlan,
        OwnTurns as OwnTurns,
        Pipeline as Pipeline,
        StagePrediction as StagePrediction,
        chunk_layers as chunk_layers,
    )
    from memo.mip.activation.solver import solve_problem as solve_problem
    from memo.mip.activation.stage_plans import needs as needs, stage_plan as stage_plan
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "checker": "check_plan require_valid",
            "cost": "predict",
            "files": "plan_to_json profile_to_json read_activation_plan read_either_plan read_hardware read_profile",
            "free_swap_length": "crossover_tokens",
            "in_flight": "holds_no_more most_held",
            "memory_peaks": "device_positions",
            "mlp_tiles": "TILES solve_tiles",
            "plan": "ActivationPlan ActivationProblem Budgets LayerPlan OwnTurns Pipeline StagePrediction chunk_layers",
            "solver": "solve_problem",
            "stage_plans": "needs stage_plan",
        },
    )
