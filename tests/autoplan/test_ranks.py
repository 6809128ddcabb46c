"""Ranks that carry out one plan: it is made for the worst of them, and none is left waiting."""

from __future__ import annotations

import concurrent.futures
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from planning_machine import (
    FORWARD_NS,
    LAYERS,
    Machine,
    step,
    tight,
)

from memo.autoplan import AutoPlan
from memo.autoplan.limits import MEASURING
from memo.mip.activation import ActivationPlan, solve_problem
from memo.swap import Level


@pytest.mark.filterwarnings("ignore:a step of .* more device memory than its budget:RuntimeWarning")
def test_ranks_save_their_inputs_alone_if_one_of_them_has_no_room_for_more() -> None:
    roomy, narrow = tight(5), tight(3.5)
    narrow.peak = narrow.device_bytes + 1
    run_together([roomy, narrow], 3)
    assert roomy.used == narrow.used == [MEASURING, Level.SAVE_INPUT]


class Together:
    """Ranks of one group as threads: each says what it has, and hears all."""

    def __init__(self, ranks: int) -> None:
        self._meeting = threading.Barrier(ranks, timeout=30)
        self._said: list[Any] = [None] * ranks

    def all_gather(self, rank: int) -> Any:
        def said(value: Any) -> list[Any]:
            self._said[rank] = value
            self._meeting.wait()
            heard = list(self._said)
            self._meeting.wait()
            return heard

        return said


def run_together(machines: Sequence[Machine], steps: int) -> list[AutoPlan]:
    group = Together(len(machines))
    autos = [AutoPlan(machine, solve_problem, all_gather=group.all_gather(n)) for n, machine in enumerate(machines)]

    def run(rank: int) -> None:
        for _ in range(steps):
            step(autos[rank], machines[rank])

    with concurrent.futures.ThreadPoolExecutor(len(machines)) as pool:
        list(pool.map(run, range(len(machines))))
    return autos


def test_ranks_of_a_group_carry_out_one_plan_made_for_the_worst_of_them() -> None:
    roomy, narrow = tight(5), tight(3.5)
    narrow.slowness = 1.5
    autos = run_together([roomy, narrow], 8)
    first, second = (auto.plan for auto in autos)
    assert first == second
    assert first is not None
    assert first.problem.budgets.device_bytes == narrow.device_bytes
    assert first.problem.profile.classes[0].forward_s == pytest.approx(1.5 * FORWARD_NS / 1e9)
    assert [type(one) for one in roomy.used] == [type(one) for one in narrow.used]
    assert autos[0].outcome().phase == autos[1].outcome().phase


def test_ranks_of_a_group_with_other_lengths_share_a_plan_for_the_longest() -> None:
    """Each has another length, of which only one is new at a time: nobody waits for anybody."""
    machines = [tight(12), tight(12)]
    group = Together(2)
    autos = [AutoPlan(machine, solve_problem, all_gather=group.all_gather(n)) for n, machine in enumerate(machines)]
    lengths = [[64, 64, 64, 64, 64, 100, 64, 64], [50, 64, 50, 64, 90, 64, 64, 128]]

    def run(rank: int) -> list[ActivationPlan | None]:
        plans = []
        for length in lengths[rank]:
            step(autos[rank], machines[rank], tokens=length)
            plans.append(autos[rank].plan)
        return plans

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    made_for = [None if plan is None else plan.problem.profile.signature.tokens for plan in first]
    assert made_for == [None, None, 64, 64, 96, 104, 64, 128]


def test_what_one_rank_cannot_do_is_planned_for_none() -> None:
    """One rank's second half of the layers is not to be recomputed: no rank recomputes there."""
    able, unable = tight(4.5), tight(4.5)
    unable.whole = set(LAYERS[3:])
    autos = run_together([able, unable], 4)
    plan = autos[0].plan
    assert plan == autos[1].plan
    assert plan is not None
    assert [len(layer.points) for layer in plan.problem.profile.layer_profiles()] == [4, 4, 4, 1, 1, 1]
    assert [layer.point for layer in plan.layers[3:]] == ["all"] * 3


def test_a_rank_that_measured_nothing_has_all_save_their_inputs_alone() -> None:
    well, deaf = tight(), tight()
    deaf.mute = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        autos = run_together([well, deaf], 6)
    assert [auto.plan for auto in autos] == [None, None]
    assert well.used[-1] is deaf.used[-1] is Level.SAVE_INPUT
    assert any("no layer ran forward and backward" in str(one.message) for one in told)
