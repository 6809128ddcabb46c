"""The packing picture's rectangles: those of the plan, thinned by weight."""

from __future__ import annotations

import pytest

from memo.mip.address import AddressPlan, AddressProblem, Buffer
from memo.mip.address.problem import ArenaPlan, Status
from memo.trace import address_plan_drawings


@pytest.fixture
def plan() -> AddressPlan:
    buffers = (
        Buffer(id="a", start=0, end=10, nbytes=64),
        Buffer(id="b", start=2, end=8, nbytes=32),
        Buffer(id="empty", start=0, end=9, nbytes=0),
        Buffer(id="c", start=0, end=5, nbytes=16, arena="host"),
    )
    arenas = (
        ArenaPlan(name="device", nbytes=96, lower_bound_nbytes=96, status=Status.OPTIMAL, method="peak order"),
        ArenaPlan(name="host", nbytes=16, lower_bound_nbytes=16, status=Status.OPTIMAL, method="peak order"),
    )
    problem = AddressProblem(buffers=buffers, capacities={"device": 128})
    return AddressPlan(problem=problem, offsets=(0, 64, 0, 0), arenas=arenas)


def test_a_buffer_is_drawn_over_its_life(plan: AddressPlan) -> None:
    device, host = address_plan_drawings(plan, title="p")
    drawn = {(one["name"], one["offset"], one["nbytes"], one["start"], one["end"]) for one in device["buffers"]}
    assert drawn == {("a", 0, 64, 0, 10), ("b", 64, 32, 2, 8)}
    assert [one["name"] for one in host["buffers"]] == ["c"]


def test_an_arena_says_its_size_bound_and_capacity(plan: AddressPlan) -> None:
    device, host = address_plan_drawings(plan, title="p")
    assert (device["peak_nbytes"], device["lower_bound_nbytes"], device["capacity_nbytes"]) == (96, 96, 128)
    assert host["capacity_nbytes"] is None
    assert device["status"] == "optimal, peak order"


def test_a_large_plan_is_thinned_to_the_largest_and_says_so(plan: AddressPlan) -> None:
    device, _ = address_plan_drawings(plan, title="p", max_rectangles=1)
    assert [one["name"] for one in device["buffers"]] == ["a"]
    assert "1 of 2" in device["thinned"]
