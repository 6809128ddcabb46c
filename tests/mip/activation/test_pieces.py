"""Recompute in pieces of tokens: what is held falls with the piece, each piece has its price, and the plan weighs them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from activation_problems import layer, machine, profile_of, random_problem, with_curves

from memo.errors import Infeasible, PlanError
from memo.events import Tier
from memo.mip.activation.checker import Rule, check_plan
from memo.mip.activation.cost import predict_stages
from memo.mip.activation.files import plan_from_json, plan_to_json
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, Budgets, LayerPlan, Pipeline, chunk_layers
from memo.mip.activation.rounding import in_tiles, piece_candidates, piece_tokens, tile_of
from memo.mip.activation.solver import DoesNotFit, solve_problem
from memo.mip.inputs.pipeline_schedules import PipelineSchedule
from memo.mip.inputs.profile import ALL, ATTENTION, MATMULS, LayerProfile
from memo.mip.simulate import simulate, verify_by_simulation

TOKENS = 1 << 20


def holding(held: int = 120, *, piece_s: float = 0.01, **rest: int) -> LayerProfile:
    """A class whose recompute of all tokens holds so many bytes, and half of them at point `matmuls`."""
    known = layer(**rest)
    names = {MATMULS: held // 2, ATTENTION: held}
    points = tuple(dataclasses.replace(point, held_bytes=names.get(point.name, 0)) for point in known.points)
    return dataclasses.replace(known, points=points, piece_s=piece_s)


def problem_of(known: LayerProfile, device: int, *, layers: int = 8, host: int = 1 << 30) -> ActivationProblem:
    fast = machine(d2h_bytes_per_s=6.0, h2d_bytes_per_s=6.0, duplex_bytes_per_s=12.0)
    budgets = Budgets(device_bytes=device, host_bytes=host)
    return ActivationProblem(profile=profile_of(*[known] * layers, tokens=TOKENS), hardware=fast, budgets=budgets)


def by_hand(part: LayerPlan, known: LayerProfile, device: int = 1 << 30) -> ActivationPlan:
    problem = problem_of(known, device, layers=4)
    layers = (part, part, part, LayerPlan())
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))


HALF = LayerPlan(points={ALL: 0.25, MATMULS: 0.25, ATTENTION: 0.5}, kept=0.0, host=1.0, piece=0.125)
"""MATMULS in two pieces, ATTENTION in four: four more than the two of a range in one piece each."""


def test_a_piece_holds_its_part_and_each_further_one_takes_its_seconds() -> None:
    plan = by_hand(HALF, holding())
    one_piece = by_hand(dataclasses.replace(HALF, piece=1.0), holding())
    assert plan.stages[0].peak_device_bytes == 2 * 160 + 120 // 8
    assert one_piece.stages[0].peak_device_bytes == 2 * 160 + 120 // 2
    assert plan.stages[0].recompute_s == pytest.approx(one_piece.stages[0].recompute_s + 3 * 4 * 0.01)
    for made in (plan, one_piece):
        assert check_plan(made) is None
        simulated = simulate(made).stages[0]
        assert simulated.peak(Tier.DEVICE).nbytes == made.stages[0].peak_device_bytes
        verify_by_simulation(made)


def test_a_range_shorter_than_a_piece_holds_what_it_has() -> None:
    part = dataclasses.replace(HALF, points={ALL: 0.75, MATMULS: 0.125, ATTENTION: 0.125}, piece=0.5)
    assert part.held_bytes(holding()) == 120 / 8
    assert part.further_pieces == 0


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("one byte too few for a piece", Rule.DEVICE),
        ("a piece that a runtime does not cut", Rule.PIECE),
        ("pieces of a layer that is not divided", Rule.PIECE),
        ("pieces that take no time", Rule.PREDICTION),
        ("pieces of which the prediction says nothing", Rule.PREDICTION),
    ],
)
def test_a_broken_rule_is_named(name: str, rule: Rule) -> None:
    plan = by_hand(HALF, holding())
    peak, stage = plan.stages[0].peak_device_bytes, plan.stages[0]
    tiny = dataclasses.replace(HALF, piece=8 / TOKENS)
    undivided = dataclasses.replace(holding(), divisible=False)
    broken = {
        "one byte too few for a piece": by_hand(HALF, holding(), peak - 1),
        "a piece that a runtime does not cut": by_hand(tiny, holding(piece_s=0.0)),
        "pieces of a layer that is not divided": by_hand(LayerPlan(points={ATTENTION: 1.0}, piece=0.5), undivided),
        "pieces that take no time": dataclasses.replace(
            plan, stages=(dataclasses.replace(stage, recompute_s=stage.recompute_s - 0.1),)
        ),
        "pieces of which the prediction says nothing": dataclasses.replace(
            plan, stages=(dataclasses.replace(stage, peak_device_bytes=2 * 160 + 60),)
        ),
    }
    violation = check_plan(broken[name])
    assert violation is not None
    assert violation.rule is rule


@pytest.mark.parametrize("piece", [0.0, -0.5, 1.5, math.nan, 1e-300])
def test_a_piece_is_a_fraction(piece: float) -> None:
    with pytest.raises(PlanError, match="a piece of"):
        LayerPlan(piece=piece)


def test_where_one_piece_fits_nothing_is_cut() -> None:
    """Host memory is short, so that layers are recomputed; the device has room for all that a recompute holds."""
    plan = solve_problem(problem_of(holding(), 2 * 160 + 140, host=600))
    assert any(part.recomputes for part in plan.layers)
    assert {part.piece for part in plan.layers} == {1.0}


def test_pieces_make_a_plan_fit_where_one_piece_does_not() -> None:
    """No host memory: all but the two whole layers keep what they save on the device, so they are recomputed."""
    known = holding(held=2000)
    device = 2 * 160 + 6 * 20 + 40
    plan = solve_problem(problem_of(known, device, host=0))
    verify_by_simulation(plan)
    uncut = [dataclasses.replace(part, piece=1.0) for part in plan.layers]
    assert predict_stages(plan.problem, uncut)[0].peak_device_bytes > device
    assert plan_from_json(plan_to_json(plan)) == plan


def test_the_piece_is_no_smaller_than_it_must_be_where_pieces_cost_much() -> None:
    dear, cheap = (solve_problem(problem_of(holding(480, piece_s=s), 2 * 160 + 200, host=700)) for s in (0.5, 1e-6))
    smallest = [min(part.piece for part in plan.layers) for plan in (dear, cheap)]
    assert smallest[0] >= smallest[1]
    assert dear.step_s >= cheap.step_s


@pytest.mark.parametrize("seed", range(8))
def test_no_size_of_a_piece_is_better_than_the_chosen_one(seed: int) -> None:
    """Of the candidates, each taken as the only one; and what is chosen keeps every budget event by event."""
    problem = random_problem(seed, layers=7, classes=1 + seed % 2)
    problem = with_curves(problem, 5, seed=seed, held=True, room=0.3)
    classes = tuple(dataclasses.replace(known, piece_s=0.001 * known.forward_s) for known in problem.profile.classes)
    problem = dataclasses.replace(problem, profile=dataclasses.replace(problem.profile, classes=classes))
    try:
        plan = solve_problem(problem)
    except Infeasible:
        return
    verify_by_simulation(plan)
    for pieces in piece_candidates(problem):
        cut = [dataclasses.replace(part, piece=pieces.get(name, 1.0)) for name, part in _named(plan)]
        layers, stages = in_tiles(problem, cut)
        if all(stage.peak_device_bytes <= problem.budgets.device_bytes for stage in stages):
            other = dataclasses.replace(plan, layers=layers, stages=stages)
            assert plan.step_s <= other.step_s * (1 + 1e-3)


def _named(plan: ActivationPlan) -> list[tuple[str, LayerPlan]]:
    return list(zip(plan.problem.profile.layers, plan.layers, strict=True))


@pytest.mark.parametrize("tokens", [40, 1000, 5000, TOKENS])
def test_pieces_are_whole_tiles_and_not_too_small(tokens: int) -> None:
    for share in (1e-9, 0.01, 0.3, 0.5, 0.999, 1.0):
        count = piece_tokens(share, tokens)
        assert count == tokens or (count % tile_of(tokens) == 0 and count >= 32)
        assert count <= max(share * tokens + 1e-3, 32, tile_of(tokens))


def test_candidates_cut_what_holds_most_first() -> None:
    large, small = holding(1000), dataclasses.replace(holding(100), name="small")
    problem = dataclasses.replace(problem_of(large, 1 << 30), profile=profile_of(large, small, tokens=TOKENS))
    candidates = list(piece_candidates(problem))
    assert [set(pieces) for pieces in candidates] == [{"block"}] * 3 + [{"block", "small"}] * 3
    assert all(after["block"] == before["block"] / 2 for before, after in itertools.pairwise(candidates))


def test_of_what_no_piece_fits_the_budget_that_is_named_does() -> None:
    problem = problem_of(holding(2000), 2 * 160, host=0)
    with pytest.raises(DoesNotFit, match=r"smallest device budget that fits is \S+ K?i?B") as raised:
        solve_problem(problem)
    least = raised.value.least_bytes["device"]
    plan = solve_problem(problem_of(holding(2000), least, host=0))
    assert check_plan(plan) is None
    with pytest.raises(Infeasible):  # by the smallest piece, which the last layer does not need
        solve_problem(problem_of(holding(2000), least - 2000 // 64 - 2, host=0))


@pytest.mark.parametrize("schedule", [PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE])
@pytest.mark.parametrize("seed", range(3))
def test_no_recompute_is_counted_in_a_forward(schedule: PipelineSchedule, seed: int) -> None:
    """Some layers recompute much and others nothing, so that the fullest forward need not be the fullest backward."""
    draw = random.Random(seed)
    known = holding(held=900)
    pipeline = Pipeline(stages=2, microbatches=4, schedule=schedule)
    problem = dataclasses.replace(problem_of(known, 1 << 30, layers=16), pipeline=pipeline)
    parts = [LayerPlan(kept=0.5, host=0.5), LayerPlan(points={ATTENTION: 1.0}, kept=0.5, host=0.5, piece=0.5)]
    layers = tuple(draw.choice(parts) for _ in range(15))
    lasts = {index for stage in range(2) for index in [chunk_layers(problem, stage)[-1][-1]]}
    layers = tuple(LayerPlan() if index in lasts else part for index, part in enumerate((*layers, LayerPlan())))
    plan = ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))
    assert check_plan(plan) is None
