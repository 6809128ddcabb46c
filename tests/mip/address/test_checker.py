"""The checker names the rule that is broken and the buffers that break it."""

from __future__ import annotations

import dataclasses
import random

import pytest
from address_problems import random_problem

from memo.errors import PlanError, PlanInvalid
from memo.mip.address import DEVICE, AddressPlan, AddressProblem, Buffer, check, require_valid, solve
from memo.mip.address.checker import AddressRule
from memo.mip.address.problem import ArenaPlan, Status


def plan_of(*buffers: tuple[Buffer, int], nbytes: int = 100, alignment: int = 1, capacity: int = 1000) -> AddressPlan:
    problem = AddressProblem(buffers=tuple(b for b, _ in buffers), alignment=alignment, capacities={DEVICE: capacity})
    arena = ArenaPlan(name=DEVICE, nbytes=nbytes, lower_bound_nbytes=0, status=Status.FEASIBLE, method="by hand")
    return AddressPlan(problem=problem, offsets=tuple(offset for _, offset in buffers), arenas=(arena,))


def buffer(name: str, start: int, end: int, nbytes: int, **rest: object) -> Buffer:
    return Buffer(id=name, start=start, end=end, nbytes=nbytes, **rest)


A = buffer("a", 0, 4, 10)
B = buffer("b", 3, 6, 10)
C = buffer("c", 4, 6, 10)

BROKEN = {
    "an overlap of one byte": (plan_of((A, 0), (B, 9)), AddressRule.OVERLAP, ("a", "b")),
    "one inside the other": (plan_of((A, 0), (buffer("b", 1, 2, 2), 4)), AddressRule.OVERLAP, ("a", "b")),
    "the same place": (plan_of((A, 5), (B, 5)), AddressRule.OVERLAP, ("a", "b")),
    "beyond the end": (plan_of((A, 91)), AddressRule.BOUNDS, ("a",)),
    "before the start": (plan_of((A, -1)), AddressRule.BOUNDS, ("a",)),
    "off the problem's alignment": (plan_of((A, 4), alignment=10), AddressRule.ALIGNMENT, ("a",)),
    "off its own alignment": (plan_of((buffer("a", 0, 4, 8, alignment=8), 4)), AddressRule.ALIGNMENT, ("a",)),
    "an arena off the alignment": (plan_of((A, 0), nbytes=101, alignment=10), AddressRule.ALIGNMENT, ()),
    "a full arena": (plan_of((A, 0), capacity=99), AddressRule.CAPACITY, ()),
    "an offset missing": (dataclasses.replace(plan_of((A, 0), (C, 0)), offsets=(0,)), AddressRule.SHAPE, ()),
    "an arena missing": (dataclasses.replace(plan_of((A, 0)), arenas=()), AddressRule.SHAPE, ()),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_with_its_buffers(name: str) -> None:
    plan, rule, ids = BROKEN[name]
    violation = check(plan)
    assert violation is not None
    assert violation.rule is rule
    assert sorted(violation.buffers) == sorted(ids)
    for one in ids:
        assert repr(one) in violation.message
    with pytest.raises(PlanInvalid, match=f"rule {rule}"):
        require_valid(plan)


def test_lives_are_half_open_and_neighbours_touch() -> None:
    assert check(plan_of((A, 0), (C, 0))) is None
    assert check(plan_of((A, 0), (B, 10))) is None


def test_a_claimed_bound_above_the_arena_is_refused() -> None:
    plan = plan_of((A, 0))
    arena = dataclasses.replace(plan.arenas[0], lower_bound_nbytes=101)
    violation = check(dataclasses.replace(plan, arenas=(arena,)))
    assert violation is not None
    assert violation.rule is AddressRule.BOUND


@pytest.mark.parametrize("seed", range(80))
def test_moving_one_buffer_is_judged_as_pair_by_pair(seed: int) -> None:
    plan = solve(random_problem(seed * 5 + 1, n=12))
    draw = random.Random(seed)
    offsets = list(plan.offsets)
    index = draw.randrange(len(offsets))
    offsets[index] = draw.randrange(plan.arenas[0].nbytes) // plan.problem.alignment * plan.problem.alignment
    moved = dataclasses.replace(plan, offsets=tuple(offsets))
    violation = check(moved)
    if violation is None or violation.rule is AddressRule.OVERLAP:
        assert (violation is not None) == bool(_overlapping_pairs(moved))
        assert violation is None or frozenset(violation.buffers) in _overlapping_pairs(moved)


def _overlapping_pairs(plan: AddressPlan) -> set[frozenset[str]]:
    pairs = set()
    placed = list(zip(plan.problem.buffers, plan.offsets, strict=True))
    for one, at in placed:
        for other, there in placed:
            meet = one.start < other.end and other.start < one.end
            if one.id < other.id and meet and at < there + other.nbytes and there < at + one.nbytes:
                pairs.add(frozenset((one.id, other.id)))
    return pairs


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 4},
        {"nbytes": -1},
        {"alignment": 0},
        {"nbytes": 1 << 63},
    ],
)
def test_a_buffer_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="'a'"):
        dataclasses.replace(A, **wrong)


def test_ids_are_unique_and_sums_stay_in_64_bits() -> None:
    with pytest.raises(PlanError, match="2 buffers have the id"):
        AddressProblem(buffers=(A, A))
    with pytest.raises(PlanError, match="2\\^62"):
        AddressProblem(buffers=tuple(buffer(str(i), 0, 1, 1 << 61) for i in range(3)))
