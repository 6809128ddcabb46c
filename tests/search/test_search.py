from __future__ import annotations

import dataclasses
import math

import pytest
from slow_tests import first
from small_clusters import all_candidates, every_division, random_space

from memo.errors import SolverFailed
from memo.gpt import GPTConfig
from memo.mip.activation import ActivationProblem, Budgets, find_plan
from memo.mip.activation.proof import AGREEMENT_IN_TURNS, agrees
from memo.mip.activation.simulator import require_within_budgets, simulate
from memo.search import Candidate, Found, Space, runs_under_memo_train, search_layouts

EQUAL = 1e-9
"""Fraction by which equal steps may differ by rounding."""
MOVING = (6, 16, 191, 201, 236, 4, 9, 31, 35, 80, 81, 84, 92, 93, 94, 106)
"""Seeds of spaces in which single layers are tried on other stages."""
SIMULATED = 2 * AGREEMENT_IN_TURNS


def exhaustive(space: Space) -> tuple[dict[Candidate, float], dict[Candidate, float]]:
    """The step of each candidate that fits, planned and checked, and the same by the simulator."""
    steps, simulated = {}, {}
    for candidate in all_candidates(space):
        request = space.request_of(candidate)
        plans = [plan for tiles in request.tiles if (plan := find_plan(request.problem(tiles))) is not None]
        if not plans:
            continue
        plan = min(plans, key=lambda plan: plan.step_s)
        simulation = simulate(plan)
        require_within_budgets(simulation)
        assert agrees(plan, simulation) or simulation.step_s < plan.step_s, candidate
        steps[candidate], simulated[candidate] = plan.step_s, simulation.step_s
    return steps, simulated


def best_of_layouts(steps: dict[Candidate, float]) -> list[float]:
    best: dict[tuple[object, ...], float] = {}
    for candidate, step_s in steps.items():
        best[candidate.layout] = min(step_s, best.get(candidate.layout, math.inf))
    return sorted(best.values())


@pytest.mark.parametrize("block", range(13))
def test_a_search_finds_what_planning_everything_does(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        experts, pattern = block in (10, 11), block == 12
        most = 8 if seed % 100 == 0 else 4 if seed % 5 == 0 or experts else 2
        space = random_space(seed, most_gpus=most, experts=experts, pattern=pattern)
        found = search_layouts(space, wanted=3, runs=runs_under_memo_train)
        steps, simulated = exhaustive(space)
        wanted, own = best_of_layouts(steps)[:3], set(all_candidates(space))
        found_s = [one.step_s for one in found.best]
        if all(one.candidate in own for one in found.best):
            assert found_s == pytest.approx(wanted, rel=EQUAL), seed
        else:  # with single layers on other stages
            assert at_most(found_s, wanted), seed
        runs = min((step_s for one, step_s in steps.items() if one.is_fully_sharded), default=math.inf)
        assert at_most([] if found.runnable is None else [found.runnable.step_s], [runs] * math.isfinite(runs)), seed
        if found.runnable is not None and found.runnable.candidate in own:
            assert found.runnable.step_s == pytest.approx(runs, rel=EQUAL), seed
        for one in found.best:
            assert steps.get(one.candidate, one.step_s) == pytest.approx(one.step_s, rel=EQUAL)
        assert found.candidates == len(all_candidates(space))
        if (
            found.best and found.best[0].candidate in simulated
        ):  # it is no slower by the simulator than predictions are off
            assert simulated[found.best[0].candidate] <= min(simulated.values()) * (1 + SIMULATED), seed
        assert_all_closed_for_a_reason(found, steps, seed)


def at_most(steps: list[float], others: list[float]) -> bool:
    """Whether the first of these steps are no longer than the others, one by one."""
    return len(steps) >= len(others) and all(
        one <= other * (1 + EQUAL) for one, other in zip(steps, others, strict=False)
    )


@pytest.mark.parametrize("block", range(4))
def test_with_layers_on_other_stages_the_answer_is_that_of_planning_every_division(block: int) -> None:
    """Never a slower one than equal and balanced numbers give; as fast as any numbers, but in the spaces listed."""
    # One layout is faster by 7.5 %, and by 26 %, with other numbers than are tried; one by a thousandth of its rounding.
    missed = {201: 0.92, 236: 0.73, 191: 0.998, 9: 0.994}
    for seed in MOVING[block::4]:
        space = random_space(seed, most_gpus=4)
        found = [one.step_s for one in search_layouts(space, wanted=3).best]
        own = best_of_layouts(steps_of(space, all_candidates(space)))[:3]
        every = best_of_layouts(steps_of(space, every_division(space)))[:3]
        assert at_most(found, own), seed
        assert at_most(every, found), seed
        assert len(found) == len(every), seed
        for step_s, least_s in zip(found, every, strict=True):
            assert least_s >= step_s * missed.get(seed, 1 - EQUAL), seed


def steps_of(space: Space, candidates: list[Candidate]) -> dict[Candidate, float]:
    found = {}
    for candidate in candidates:
        plans = [
            plan for tiles in space.request.tiles if (plan := find_plan(space.problem(candidate, tiles))) is not None
        ]
        if plans:
            found[candidate] = min(plan.step_s for plan in plans)
    return found


def test_a_stage_that_lacks_memory_has_fewer_layers() -> None:
    """No plan fits with the numbers of equal work; with a layer less on the fuller stage it is the second best."""
    space = random_space(236, most_gpus=4)
    config, budgets = space.request.config, Budgets(device_bytes=29_600_000, disk_bytes=16_000_000)
    assert isinstance(config, GPTConfig)
    config = dataclasses.replace(config, kv_heads=config.heads)
    space = dataclasses.replace(space, request=dataclasses.replace(space.request, config=config, budgets=budgets))
    second = search_layouts(space, wanted=3).best[1].candidate
    own = [one for one in all_candidates(space) if dataclasses.replace(one, stage_layers=second.stage_layers) == second]
    assert [one.stage_layers for one in own] == [(2, 1)]
    assert second.stage_layers == (1, 2)
    assert not steps_of(space, own)


def bare(candidate: Candidate) -> tuple[object, ...]:
    """What it is whatever is sharded."""
    return candidate.shape, candidate.schedule, candidate.chunks, candidate.stage_layers


def assert_all_closed_for_a_reason(found: Found, steps: dict[Candidate, float], seed: int) -> None:
    """No bound is above a step of what it closed."""
    space = found.space
    for closed in found.closed:
        own = [closed.candidate] if closed.candidate is not None else []
        if closed.candidate is None:
            own = [one for one in all_candidates(space) if one.shape in closed.shapes]
            own = [one for one in own if closed.setting in (None, one.setting)]
            own = [one for one in own if closed.schedule is None or bare(closed.schedule) == bare(one)]
            assert len(own) == closed.count
        for candidate in own:
            assert closed.bound_s <= steps.get(candidate, math.inf) * (1 + EQUAL), (seed, candidate)
    assert not any(candidate in steps for candidate in found.without_plan)


def test_context_parallel_ranks_that_share_key_value_heads_are_searched() -> None:
    spaces = [random_space(seed) for seed in range(0, 80, 4)]
    exchanged = [(space.request.config, shape) for space in spaces for shape in space.shapes if not shape.ring]
    assert any(shape.cp > config.kv_heads // shape.tp for config, shape in exchanged)
    assert all(config.heads % (shape.cp * shape.tp) == 0 for config, shape in exchanged)


def test_the_same_space_gives_the_same_answer() -> None:
    space = random_space(301, most_gpus=4)
    first, second = (search_layouts(space, runs=runs_under_memo_train) for _ in range(2))
    assert [one.candidate for one in first.best] == [one.candidate for one in second.best]
    assert [one.plan for one in first.planned] == [one.plan for one in second.planned]
    assert first.closed == second.closed


def test_processes_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    space = random_space(310, most_gpus=4)
    alone = search_layouts(space)
    monkeypatch.setattr("memo.search.search._Search._has_processes", lambda search: True)  # they bound from the start
    beside = search_layouts(space, workers=2)
    assert [(one.candidate, one.plan) for one in alone.planned] == [(one.candidate, one.plan) for one in beside.planned]
    assert alone.closed == beside.closed


def test_a_bound_that_the_solver_does_not_find_leaves_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    space = random_space(310, most_gpus=4)
    sound = search_layouts(space)

    def fail(problem: ActivationProblem) -> float | None:
        raise SolverFailed("no answer")

    monkeypatch.setattr("memo.search.bounds.relaxed_step_s", fail)
    found = search_layouts(space)
    assert [(one.candidate, one.step_s) for one in found.best] == [(one.candidate, one.step_s) for one in sound.best]


def best_step_s(space: Space) -> float:
    found = search_layouts(space, wanted=1)
    return found.best[0].step_s if found.best else math.inf


@pytest.mark.parametrize("seed", first(range(40), 12))
def test_more_of_anything_never_makes_the_answer_slower(seed: int) -> None:
    """Memory, links and nodes; the plans are rounded to tiles, so that steps agree to the tiles' fraction."""
    space = random_space(1000 + seed, most_gpus=4)
    request, budgets, machine = space.request, space.request.budgets, space.request.machine
    names = ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s", "node_d2h_bytes_per_s", "node_h2d_bytes_per_s")
    network = dataclasses.replace(machine.network, nic_bytes_per_s=4 * machine.network.nic_bytes_per_s)
    changes = {
        "device": {"budgets": dataclasses.replace(budgets, device_bytes=2 * budgets.device_bytes)},
        "host": {"budgets": dataclasses.replace(budgets, host_bytes=2 * budgets.host_bytes)},
        "links": {"machine": dataclasses.replace(machine, **{name: 2 * getattr(machine, name) for name in names})},
        "peers": {"machine": dataclasses.replace(machine, nvlink_bytes_per_s=2 * machine.nvlink_bytes_per_s)},
        "network": {"machine": dataclasses.replace(machine, network=network)},
    }
    before_s = best_step_s(space)
    for what, change in changes.items():
        more = dataclasses.replace(space, request=dataclasses.replace(request, **change))
        assert best_step_s(more) <= before_s * 1.002, what
    assert best_step_s(dataclasses.replace(space, nodes=space.nodes + 1)) <= before_s * (1 + EQUAL)
