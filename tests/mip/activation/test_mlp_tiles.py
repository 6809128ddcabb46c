"""The number of MLP tiles is chosen with the plan: few where memory is plenty, more where it is not, never at a loss."""

from __future__ import annotations

import dataclasses

import pytest

from memo.errors import Infeasible, PlanError
from memo.gpt import preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.activation import (
    MLP_TILE_COUNTS,
    ActivationPlan,
    ActivationProblem,
    Budgets,
    DoesNotFit,
    plan_to_json,
    solve_mlp_tiles,
    solve_problem,
)
from memo.mip.activation.files import plan_from_json
from memo.mip.inputs import Profile, hardware_preset

MIB, GIB = 1 << 20, 1 << 30
H200 = hardware_preset("h200")
CONFIG = preset("350m", variant="llama", heads=8, layers=6)
LENGTH = 1 << 20


def problem(tiles: int, *, device: int, host: int = 512 * GIB) -> ActivationProblem:
    config = dataclasses.replace(CONFIG, mlp_tiles=tiles)
    profile = derive_profile(config, H200, StepLayout(tokens=LENGTH))
    return ActivationProblem(profile=profile, hardware=H200, budgets=Budgets(device_bytes=device, host_bytes=host))


def solved(device: int, **rest: int) -> ActivationPlan:
    return solve_mlp_tiles(lambda tiles: problem(tiles, device=device, **rest))


def test_where_everything_fits_there_are_no_tiles() -> None:
    plan = solved(1024 * GIB)
    assert plan.declined is not None
    assert plan.problem.profile.mlp_tiles == 1


def test_where_two_whole_layers_do_not_fit_tiles_make_room() -> None:
    least = {}
    for tiles in (1, MLP_TILE_COUNTS[-1]):
        with pytest.raises(DoesNotFit) as refused:
            solve_problem(problem(tiles, device=1))
        least[tiles] = refused.value.least_bytes["device"]
    assert least[MLP_TILE_COUNTS[-1]] < 0.7 * least[1], "two layers without their wide activations"
    assert solved(least[MLP_TILE_COUNTS[-1]] + MIB).problem.profile.mlp_tiles > 1
    with pytest.raises(Infeasible, match=f"MLPs in {MLP_TILE_COUNTS[-1]} tiles"):
        solved(least[MLP_TILE_COUNTS[-1]] - MIB)


@pytest.mark.parametrize("device", [64 * GIB, 96 * GIB, 140 * GIB])
@pytest.mark.parametrize("host", [0, 64 * GIB])
def test_no_number_of_tiles_is_faster_than_the_chosen_one(device: int, host: int) -> None:
    chosen = solved(device, host=host)
    steps = {}
    for tiles in MLP_TILE_COUNTS:
        try:
            steps[tiles] = solve_problem(problem(tiles, device=device, host=host)).step_s
        except Infeasible:
            continue
    assert chosen.step_s == min(steps.values())
    assert chosen.problem.profile.mlp_tiles == min(steps, key=lambda tiles: (steps[tiles], tiles))


def test_a_plans_file_carries_the_tiles_and_older_files_are_of_whole_mlps() -> None:
    plan = solve_problem(problem(4, device=140 * GIB))
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert plan_from_json(text).problem.profile.mlp_tiles == 4
    without = text.replace(', "mlp_tiles": 4', "")
    assert without != text
    assert plan_from_json(without).problem.profile.mlp_tiles == 1


@pytest.mark.parametrize("tiles", [0, -1, 1 << 21])
def test_a_number_of_tiles_that_is_none_is_refused(tiles: int) -> None:
    whole: Profile = problem(1, device=GIB).profile
    with pytest.raises(PlanError, match="tiles"):
        dataclasses.replace(whole, mlp_tiles=tiles)
