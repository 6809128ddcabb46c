"""The host arena is laid out by plan from the second step on: no fragmentation, and never two tenants at one place."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from small_models import assert_equal, ids, stack, train

import memo
from memo.swap.backends import CpuBackend
from memo.swap.memory import planned_layout
from memo.swap.memory.free_list import FreeList
from memo.swap.memory.planned_layout import KEPT_LAYOUTS, KEPT_SIZES
from memo.swap.tiers import HostTier
from memo.swap.tiers.host_and_disk import PAGE

if TYPE_CHECKING:
    from memo.swap.tiers import Extent


def run(tier: HostTier, script: list[tuple[str, int]]) -> list[Extent | None]:
    """("claim", pages) and ("release", index of the claim)."""
    extents: list[Extent | None] = []
    for what, value in script:
        if what == "claim":
            extents.append(tier.reserve(value * PAGE))
        elif (extent := extents[value]) is not None:
            extent.tier.release(extent)
    tier.end_step()
    return extents


# First fit puts the large one behind the hole that the first leaves: seven pages where five are enough.
FRAGMENTING = [("claim", 2), ("claim", 1), ("release", 0), ("claim", 4), ("release", 1), ("release", 2)]


def test_the_second_step_takes_no_more_than_the_lower_bound() -> None:
    tier = HostTier(CpuBackend(), 1 << 30, segment_bytes=PAGE)
    run(tier, FRAGMENTING)
    assert tier.reserved == 5 * PAGE  # two are given back
    run(tier, FRAGMENTING)
    assert tier._recorder.misses == 0
    assert tier.reserved == 5 * PAGE
    assert tier.used == 0


def test_a_step_that_differs_is_served_and_planned_anew() -> None:
    tier = HostTier(CpuBackend(), 1 << 30, segment_bytes=64 * PAGE)
    run(tier, FRAGMENTING)
    longer = [*FRAGMENTING[:-2], ("claim", 3), ("release", 1), ("release", 2), ("release", 3)]
    extents = run(tier, longer)
    assert all(extent is not None for extent in extents)
    assert tier.used == 0
    run(tier, longer)
    assert tier._recorder.misses == 0


def test_a_place_still_held_is_never_given_to_another() -> None:
    tier = HostTier(CpuBackend(), 1 << 30, segment_bytes=64 * PAGE)
    run(tier, FRAGMENTING)
    late = [("claim", 2), ("claim", 1), ("claim", 4), ("release", 0), ("release", 1), ("release", 2)]
    live: list[Any] = []
    for what, value in late[:3]:
        assert what == "claim"
        live.append(tier.reserve(value * PAGE))
    blocks = [(extent.room.memory.data_ptr(), extent.room.memory.data_ptr() + extent.nbytes) for extent in live]
    blocks.sort()
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(blocks))


def test_the_budget_holds_with_plans_too() -> None:
    tier = HostTier(CpuBackend(), 5 * PAGE, segment_bytes=64 * PAGE)
    first = run(tier, FRAGMENTING)
    assert first[2] is None  # first fit has two holes of two pages, and no room for four
    run(tier, FRAGMENTING)
    assert tier.reserved <= 5 * PAGE


THREE_OF_THREE = [("claim", 3), ("claim", 3), ("claim", 3), ("release", 0), ("release", 1), ("release", 2)]


def test_a_budget_that_the_step_fills_leaves_nothing_over() -> None:
    tier = HostTier(CpuBackend(), 9 * PAGE, segment_bytes=4 * PAGE)
    assert None not in run(tier, THREE_OF_THREE)
    assert tier.reserved == 9 * PAGE


def test_a_slab_a_twentieth_too_large_is_kept_and_a_larger_one_gives_back_its_end() -> None:
    sizes = {}
    for surplus in (1, 2):
        tier = HostTier(CpuBackend(), 64 * PAGE, segment_bytes=(20 + surplus) * PAGE)
        run(tier, [("claim", 20), ("release", 0)])
        sizes[surplus] = tier.reserved // PAGE
    assert sizes == {1: 21, 2: 20}


def test_what_is_expected_is_taken_at_once_and_less_later_gives_nothing_back() -> None:
    tier = HostTier(CpuBackend(), 9 * PAGE, segment_bytes=4 * PAGE)
    tier.expect(20 * PAGE)
    assert tier.reserved == 9 * PAGE, "the budget is hard"
    tier.expect(3 * PAGE)
    run(tier, [("claim", 3), ("release", 0)])
    assert tier.reserved == 9 * PAGE, "plans follow one another, and locking pages takes long"


def test_another_need_waits_until_nothing_is_held() -> None:
    tier = HostTier(CpuBackend(), 9 * PAGE, segment_bytes=PAGE)
    held = tier.reserve(3 * PAGE)
    assert held is not None
    tier.expect(6 * PAGE)
    tier.end_step()
    other = tier.reserve(PAGE)
    assert other is not None
    held.tier.release(held)
    other.tier.release(other)
    run(tier, [("claim", 3), ("release", 0)])
    assert tier.reserved == 6 * PAGE
    tier.expect(0)
    run(tier, [("claim", 3), ("release", 0)])
    assert tier.reserved == 6 * PAGE, "another plan may follow"


_CLAIMS = st.tuples(st.just("claim"), st.integers(1, 7 * PAGE))
_OTHERS = st.tuples(st.sampled_from(["release", "expect", "end"]), st.integers(0, 40))


@settings(deadline=None, max_examples=150)
@given(
    budget=st.integers(PAGE, 24 * PAGE),
    segment=st.sampled_from([PAGE, 4 * PAGE, 64 * PAGE]),
    script=st.lists(_CLAIMS | _OTHERS, max_size=60),
)
def test_no_sequence_of_claims_exceeds_the_budget_or_shares_a_byte(
    budget: int, segment: int, script: list[tuple[str, int]]
) -> None:
    tier = HostTier(CpuBackend(), budget, segment_bytes=segment)
    held: list[Any] = []
    for what, value in script:
        if what == "claim" and (extent := tier.reserve(value)) is not None:
            held.append(extent)
        elif what == "release" and held:
            tier.release(held.pop(value % len(held)))
        elif what == "expect":
            tier.expect(value * PAGE)
        elif what == "end":
            while held:
                tier.release(held.pop())
            tier.end_step()
        assert tier.reserved <= budget
        ends = sorted((extent.room.offset, extent.room.offset + extent.nbytes) for extent in held)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(ends))
        assert not ends or ends[-1][1] <= tier.reserved
        assert tier.used == sum(extent.nbytes for extent in held)


@pytest.mark.parametrize("lengths", [(48, 48, 48, 48), (48, 32, 48, 32, 48, 32), (24, 48, 40, 16)])
def test_gradients_are_equal_over_planned_steps_and_changing_lengths(lengths: tuple[int, ...]) -> None:
    def steps(manager: memo.Manager | None, model: torch.nn.Module) -> Any:
        done = []
        for number, seq in enumerate(lengths):
            done += train(model, lambda _, n=number, s=seq: model(ids(n, seq=s)), manager, steps=1)
        return done

    model, reference = stack(), stack()
    manager = memo.offload(model, alpha=1.0, host="16MiB", disk=[], min_bytes=512)
    assert_equal(steps(manager, model), steps(None, reference))
    tier = manager._engine.tiers[0]
    assert isinstance(tier, HostTier)
    assert tier.reserved < 1 << 24
    manager.close()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=30))
def test_allocate_at_agrees_with_an_interval_oracle(requests: list[tuple[int, int]]) -> None:
    space = FreeList(32 * 16, align=16)
    taken: dict[int, int] = {}
    for start, length in requests:
        offset, nbytes = start * 16, length * 16
        free = offset + nbytes <= 32 * 16 and all(
            offset + nbytes <= other or other + size <= offset for other, size in taken.items()
        )
        assert space.allocate_at(offset, nbytes) is free
        if free:
            taken[offset] = nbytes
        elif offset in taken:
            space.free(offset)
            del taken[offset]
    assert space.used == sum(taken.values())
    for offset in list(taken):
        space.free(offset)
    assert space.allocate(32 * 16) == 0


def pushed_and_popped(pages: list[int]) -> list[tuple[str, int]]:
    """Claims in forward, released in the opposite order in backward."""
    return [*(("claim", each) for each in pages), *(("release", at) for at in reversed(range(len(pages))))]


def test_steps_of_ever_other_sizes_find_room_for_all_that_fits() -> None:
    """As rows that are routed to experts: the plan of one step must leave no holes in another."""
    draw, held = random.Random(0), 40
    tier = HostTier(CpuBackend(), held * PAGE, segment_bytes=PAGE)
    for _ in range(50):
        routed = draw.randrange(1, 12)
        pages = [2, 1, routed, 1, 2, 12 - routed, 1, 2, 3]
        pages.append(held - 3 - sum(pages))
        draw.shuffle(pages)
        assert None not in run(tier, pushed_and_popped([3, *pages]))
        assert tier.used == 0
        assert tier.reserved <= held * PAGE


def test_steps_with_many_misses_are_left_to_first_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted_plans(monkeypatch)
    tier = HostTier(CpuBackend(), 1 << 30, segment_bytes=64 * PAGE)
    for step in range(20):
        run(tier, pushed_and_popped([2, 3 + step, 1, 4 + step]))
    assert len(made) == 2, "after the first step, and after one that missed"
    assert tier._recorder.nbytes == 0


def test_first_sizes_that_never_come_again_are_planned_as_many_times_as_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = counted_plans(monkeypatch)
    tier = HostTier(CpuBackend(), 1 << 30, segment_bytes=64 * PAGE)
    for step in range(200):
        run(tier, pushed_and_popped([1 + step, 3]))
    assert len(made) == KEPT_LAYOUTS
    assert len(tier._recorder._known) == KEPT_SIZES
    run(tier, pushed_and_popped([200, 3]))
    assert len(made) == KEPT_LAYOUTS + 1, "one that has come again"


def counted_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each plan that is made."""
    made: list[int] = []
    plan = planned_layout.plan_layout

    def noted(lives: Any, *others: int) -> Any:
        made.append(len(lives))
        return plan(lives, *others)

    monkeypatch.setattr(planned_layout, "plan_layout", noted)
    return made
