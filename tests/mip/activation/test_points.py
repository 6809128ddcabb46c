"""Curves of many points: each layer at one, as good as brute force, within every budget."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from activation_problems import layer, machine, plan_activations, profile_of, random_problem, with_curves
from slow_tests import first

from memo.errors import Infeasible, PlanError
from memo.mip.activation import (
    ActivationProblem,
    Budgets,
    DoesNotFit,
    Pipeline,
    check_plan,
    plan_to_json,
    relaxed_step_s,
    solve_problem,
)
from memo.mip.activation.files import plan_from_json
from memo.mip.activation.linear_program import PlanModel
from memo.mip.activation.proof import verify_by_simulation
from memo.mip.activation.whole_points import round_points
from memo.mip.inputs import ALL, ATTENTION, MATMULS, LayerProfile, PipelineSchedule, PointProfile

PIPELINES = [
    Pipeline(),
    Pipeline(stages=3, microbatches=5),
    Pipeline(microbatches=6, held=3),
    Pipeline(stages=2, microbatches=4, schedule=PipelineSchedule.ZERO_BUBBLE_V),
]


def copy_s(host, disk, link, drive):
    """Both cross the link at once: half of it each, what the drive does not take goes to the other, until one is done."""
    disk_share = min(drive, link / 2)
    host_share = link - disk_share
    both = np.minimum(host / host_share, disk / disk_share)
    return both + (host - both * host_share) / link + (disk - both * disk_share) / min(drive, link)


def brute_force(problem: ActivationProblem) -> float:
    """The shortest step of three layers, on ever finer grids; the last layer stays as it is.

    Of layers 0 and 1 the coordinates are the point of its curve that the layer is at, and the fractions of its bytes sent
    to host and to disk.
    """
    first, second, last = problem.profile.layer_profiles()
    rates, budgets = problem.hardware.lanes(1), problem.budgets
    disk = bool(budgets.disk_bytes)
    ends = problem.profile.embedding, problem.profile.head
    static = sum(known.static_bytes for known in (first, second, last)) + sum(end.static_bytes for end in ends)
    room = budgets.device_bytes - static - ends[0].saved_bytes
    fixed_s = sum(known.forward_s + known.backward_s for known in (first, second, last, *ends))

    def step_s(u1, h1, d1, u2, h2, d2):
        def of(known, u):
            at = np.arange(len(known.points))
            columns = ("saved_bytes", "recompute_s", "held_bytes")
            saved, again, held = (np.interp(u, at, [getattr(one, name) for one in known.points]) for name in columns)
            return known.fixed_bytes + saved, again, held

        (s1, r1, g1), (s2, r2, g2) = of(first, u1), of(second, u2)
        total = fixed_s + r1 + r2
        for saved, h, d, window, again in ((s1, h1, d1, second, r2), (s2, h2, d2, last, 0.0)):
            out = copy_s(saved * h, saved * d, rates.d2h_bytes_per_s, rates.disk_write_bytes_per_s)
            back = copy_s(saved * h, saved * d, rates.h2d_bytes_per_s, rates.disk_read_bytes_per_s)
            total = total + np.maximum(out - window.forward_s, 0) + np.maximum(back - window.backward_s - again, 0)
        k1, k2 = s1 * (1 - h1 - d1), s2 * (1 - h2 - d2)
        ok = (h1 + d1 <= 1 + 1e-12) & (h2 + d2 <= 1 + 1e-12) & (ends[0].transient_bytes <= room)
        ok = ok & (first.full_bytes + np.maximum(first.transient_bytes, first.backward_transient_bytes + g1) <= room)
        moving = np.maximum(second.transient_bytes, second.backward_transient_bytes + g2)
        ok = ok & (s1 + second.full_bytes + moving <= room)  # right after layer 0 ran and before it runs again
        ok = ok & (k1 + s2 + last.full_bytes + last.transient_bytes <= room)
        ok = ok & (k1 + k2 + last.full_bytes + ends[1].saved_bytes + ends[1].transient_bytes <= room)
        ok = ok & (s1 * h1 + s2 * h2 <= budgets.host_bytes)
        ok = ok & (s1 * d1 + s2 * d2 <= budgets.disk_bytes)
        if budgets.disk_wear_bytes_per_day is not None:
            ok = ok & (s1 * d1 + s2 * d2 <= budgets.disk_wear_bytes_per_day / 86400 * (fixed_s + r1 + r2))
        return np.where(ok, total, np.inf)

    limits = [len(first.points) - 1, 1, 1, len(second.points) - 1, 1, 1]
    middle, half, best = [limit / 2 for limit in limits], 0.5, np.inf
    for _ in range(40):
        axes = []
        for number, (centre, limit) in enumerate(zip(middle, limits, strict=True)):
            if number % 3 == 0:
                axes.append(np.arange(limit + 1.0))
            elif number % 3 == 2 and not disk:
                axes.append(np.zeros(1))
            else:
                begin, end = max(centre - half * limit, 0), min(centre + half * limit, limit)
                axes.append(np.unique([*np.linspace(begin, end, 6), centre]))
        steps = step_s(*np.meshgrid(*axes, indexing="ij", sparse=True))
        if steps.min() <= best:
            best = steps.min()
            at = np.unravel_index(steps.argmin(), steps.shape)
            middle = [axis[i] for axis, i in zip(axes, at, strict=True)]
        half *= 0.85
    return float(best)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("seed", first(range(12), 4))
def test_brute_force_finds_little_better(seed: int, held: bool) -> None:
    problem = with_curves(random_problem(seed, layers=3, classes=2), 8, seed=seed, held=held)
    expected, bound_s = brute_force(problem), relaxed_step_s(problem)
    assert (np.inf if bound_s is None else bound_s) <= expected * (1 + 1e-6) or expected == np.inf
    try:
        plan = solve_problem(problem)
    except Infeasible:
        assert expected == np.inf
        return
    assert check_plan(plan) is None
    assert plan.step_s <= expected * 1.02
    assert expected <= plan.step_s * 1.02, "the grid's search ends within two hundredths"


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: f"{pipeline.schedule}, {pipeline.stages} stages")
def test_every_plan_is_within_budgets_simulates_as_predicted_and_is_the_same_again(pipeline: Pipeline) -> None:
    """With bytes that recomputes hold. The simulation shares no code with the planner."""
    solved = mixed = 0
    for seed in range(10):
        problem = random_problem(seed, layers=9, classes=1 + seed % 2, pipeline=pipeline)
        problem = with_curves(problem, 8, seed=seed, held=True)
        try:
            plan = solve_problem(problem)
        except Infeasible:
            continue
        solved += 1
        verify_by_simulation(plan)
        mixed += len({part.point for part in plan.layers}) > 2
        assert plan_to_json(solve_problem(problem)) == plan_to_json(plan)
        assert plan_from_json(plan_to_json(plan)) == plan
    assert solved > 5
    assert mixed


def test_what_a_fraction_would_save_is_saved_by_a_part_of_the_layers() -> None:
    """Host memory for 52 % of the bytes of ten layers: five of them are at `all`, five at the point without any."""
    block = layer(always=0, all=1000, matmuls=None, attention=1.0)
    fast = machine(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6, duplex_bytes_per_s=2e6)
    budgets = Budgets(device_bytes=2 * block.full_bytes + 1, host_bytes=5200)
    plan = plan_activations(profile_of(*[block] * 12), fast, budgets)
    at = [part.point for part in plan.layers[:10]]
    assert sorted(at) == [ALL] * 5 + [ATTENTION] * 5
    assert plan.stages[0].peak_host_bytes == 4999, "the byte beyond two layers stays on the device"
    assert plan.stages[0].recompute_s == pytest.approx(5.0)


def test_a_point_whose_recompute_has_no_room_is_not_taken_although_a_mix_of_it_would_fit() -> None:
    """Roundings of the mix do not fit; the program with integers finds that the dear point does."""
    points = (
        PointProfile(name=ALL, saved_bytes=1000),
        PointProfile(name="p1", saved_bytes=500, recompute_s=0.5, held_bytes=600),
        PointProfile(name="p2", saved_bytes=495, recompute_s=5.0),
    )
    block = dataclasses.replace(layer(always=0, all=1000), points=points)
    fast = machine(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6, duplex_bytes_per_s=2e6)
    budgets = Budgets(device_bytes=2 * block.full_bytes + 94, host_bytes=4 * 520)
    problem = ActivationProblem(profile=profile_of(*[block] * 6), hardware=fast, budgets=budgets)
    relaxed = PlanModel(problem)
    assert relaxed.solve()
    assert round_points(relaxed) is None
    plan = solve_problem(problem)
    assert {part.point for part in plan.layers[1:4]} <= {ALL, "p2"}
    verify_by_simulation(plan)


def test_where_no_layer_fits_at_any_point_the_budget_that_is_named_fits() -> None:
    block = layer(always=0, all=1000, matmuls=(600, 0.5), attention=None)
    budgets = Budgets(device_bytes=block.full_bytes + 600, host_bytes=4 * 599)
    problem = ActivationProblem(profile=profile_of(*[block] * 6), hardware=machine(), budgets=budgets)
    with pytest.raises(DoesNotFit, match=r"the device lacks \d B .*; or a host budget of 2.34\d KiB a node") as raised:
        solve_problem(problem)
    assert raised.value.least_bytes["host"] in range(2400, 2410)
    enough = dataclasses.replace(problem, budgets=dataclasses.replace(budgets, host_bytes=2401))
    assert {part.point for part in solve_problem(enough).layers[:4]} == {MATMULS}


def test_a_budget_that_only_fractions_fit_is_infeasible_by_what_whole_layers_lack() -> None:
    """Five layers move. Parts of each at p1, which holds 600 bytes, would fit; no layer has room for all of it."""
    points = (
        PointProfile(name=ALL, saved_bytes=1000),
        PointProfile(name="p1", saved_bytes=500, recompute_s=0.5, held_bytes=600),
    )
    block = dataclasses.replace(layer(always=0, all=1000), points=points)
    budgets = Budgets(device_bytes=block.full_bytes + 590, host_bytes=4000)
    problem = ActivationProblem(profile=profile_of(*[block] * 6), hardware=machine(), budgets=budgets)
    assert PlanModel(problem.without_overlap).solve()
    # 5 x 1000 bytes less 590 that stay must move; with 1000 + 600 on the device all layers may be at p1.
    with pytest.raises(DoesNotFit, match=r"the device lacks 1\d B .*; or a host budget of 4.3\d* KiB") as raised:
        solve_problem(problem)
    assert raised.value.least_bytes["host"] in range(4410, 4420)


@pytest.mark.parametrize("seed", range(6))
def test_of_whole_layers_the_budget_that_is_named_fits_and_nothing_much_less_does(seed: int) -> None:
    problem = random_problem(seed, layers=4 + seed, classes=1 + seed % 2)
    problem = with_curves(problem, 4, seed=seed, held=True)
    budgets = dataclasses.replace(
        problem.budgets, device_bytes=problem.budgets.device_bytes // 6, host_bytes=problem.budgets.host_bytes // 4
    )
    with pytest.raises(DoesNotFit) as raised:
        solve_problem(dataclasses.replace(problem, budgets=budgets))
    least = raised.value.least_bytes["device"]
    enough = dataclasses.replace(budgets, device_bytes=least)
    assert check_plan(solve_problem(dataclasses.replace(problem, budgets=enough))) is None
    less = dataclasses.replace(budgets, device_bytes=least - (least - budgets.device_bytes) // 50 - 2000)
    with pytest.raises(Infeasible):
        solve_problem(dataclasses.replace(problem, budgets=less))


def curve(*points: PointProfile) -> LayerProfile:
    return dataclasses.replace(layer(), points=points)


WHOLE = PointProfile(name=ALL, saved_bytes=100)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ((), "'all' comes first"),
        ((PointProfile(name="p1", saved_bytes=3),), "'all' comes first"),
        ((WHOLE, PointProfile(name=ALL, saved_bytes=3)), "two points have one name"),
        ((WHOLE, PointProfile(name="p1", saved_bytes=100)), "not fewer than all"),
        ((PointProfile(name=ALL, saved_bytes=100, held_bytes=1),), "recomputes nothing"),
        (tuple(PointProfile(name=f"p{n}" if n else ALL, saved_bytes=999 - n) for n in range(300)), "at most 256"),
    ],
)
def test_points_that_make_no_curve_are_refused(points: tuple[PointProfile, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        curve(*points)
