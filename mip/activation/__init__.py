"""Activation planning: problem, linear program, points of whole layers, cost model and checker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.mip.activation.checker import check_plan as check_plan, require_valid as require_valid
    from memo.mip.activation.cost import predict_kept_times as predict_kept_times, predict_stages as predict_stages
    from memo.mip.activation.files import (
        plan_to_json as plan_to_json,
        profile_to_json as profile_to_json,
        read_activation_plan as read_activation_plan,
        read_any_plan as read_any_plan,
        read_hardware as read_hardware,
        read_profile as read_profile,
    )
    from memo.mip.activation.in_flight import in_flight_within as in_flight_within, peak_in_flight as peak_in_flight
    from memo.mip.activation.memory_peaks import (
        DeviceMemory as DeviceMemory,
        MemoryUse as MemoryUse,
        PeakCandidate as PeakCandidate,
        device_peak_candidates as device_peak_candidates,
        highest_memory as highest_memory,
        room_in_forward as room_in_forward,
        stage_memory as stage_memory,
    )
    from memo.mip.activation.mlp_tiles import MLP_TILE_COUNTS as MLP_TILE_COUNTS, solve_mlp_tiles as solve_mlp_tiles
    from memo.mip.activation.pipeline_time import microbatches_s as microbatches_s
    from memo.mip.activation.plan import (
        ActivationPlan as ActivationPlan,
        ActivationProblem as ActivationProblem,
        Budgets as Budgets,
        LayerPlan as LayerPlan,
        Pipeline as Pipeline,
        StageMachine as StageMachine,
        StagePrediction as StagePrediction,
        StageTurns as StageTurns,
        layers_of_runs as layers_of_runs,
    )
    from memo.mip.activation.solver import (
        DoesNotFit as DoesNotFit,
        find_plan as find_plan,
        fits as fits,
        misfit_of as misfit_of,
        relaxed_step_s as relaxed_step_s,
        solve_problem as solve_problem,
    )
    from memo.mip.activation.stage_plans import (
        extract_stage_plan as extract_stage_plan,
        lower_tier_nbytes as lower_tier_nbytes,
    )
    from memo.mip.activation.stage_view import StageView as StageView
else:
    __getattr__, __dir__, __all__ = attach(__name__)
