"""Bytes of host arena that a plan's claims need are those that a host tier takes for them, in its first step and later."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings, strategies as st

from memo.swap import claims_in_turn, host_bytes_needed
from memo.swap.backends import CpuBackend
from memo.swap.memory.host_bytes import Claim, HostBytes
from memo.swap.memory.page_aligned import whole_pages
from memo.swap.tiers import HostTier
from memo.swap.tiers.host_and_disk import PAGE

# First fit puts the large one behind the hole that the first leaves: seven pages where five are enough.
FRAGMENTING = [
    Claim(nbytes=2 * PAGE - 5, start=0, end=2),
    Claim(nbytes=PAGE, start=1, end=4),
    Claim(nbytes=4 * PAGE, start=3, end=5),
]


def run(tier: HostTier, claims: list[Claim]) -> int | None:
    """Makes one step's claims; returns the end of the last block, or None if a claim found no room."""
    held: dict[int, Any] = {}
    end = 0
    times = sorted(
        [
            *((claim.end, 0, at) for at, claim in enumerate(claims)),
            *((claim.start, 1, at) for at, claim in enumerate(claims)),
        ]
    )
    failed = False
    for _, is_claim, at in times:
        if is_claim:
            extent = held[at] = tier.reserve(claims[at].nbytes)
            if extent is None:
                failed = True
            else:
                end = max(end, extent.room.offset + whole_pages(claims[at].nbytes))
        elif (extent := held.pop(at)) is not None:
            extent.tier.release(extent)
    tier.end_step()
    return None if failed else end


def test_what_one_forward_claims_and_backward_releases_takes_its_whole_pages() -> None:
    needed = host_bytes_needed(claims_in_turn([1, PAGE, PAGE + 1]))
    assert needed == HostBytes(first_step=4 * PAGE, later_steps=4 * PAGE)


def test_holes_of_first_fit_count_in_the_first_step_alone() -> None:
    assert host_bytes_needed(FRAGMENTING) == HostBytes(first_step=7 * PAGE, later_steps=5 * PAGE)


def test_nothing_needs_nothing() -> None:
    assert host_bytes_needed([]) == HostBytes(first_step=0, later_steps=0)


lives = st.tuples(st.integers(1, 6 * PAGE), st.integers(0, 30), st.integers(1, 12)).map(
    lambda drawn: Claim(nbytes=drawn[0], start=drawn[1], end=drawn[1] + drawn[2])
)


@settings(deadline=None, max_examples=150)
@given(st.lists(lives, min_size=1, max_size=14))
def test_a_tier_of_that_budget_has_room_in_both_steps_and_takes_just_as_much(claims: list[Claim]) -> None:
    needed = host_bytes_needed(claims)
    tier = HostTier(CpuBackend(), needed.first_step, segment_bytes=PAGE)
    assert run(tier, claims) == needed.first_step
    assert run(tier, claims) == needed.later_steps <= needed.first_step
    tier.close()
    if needed.first_step > PAGE:
        short = HostTier(CpuBackend(), needed.first_step - PAGE, segment_bytes=PAGE)
        assert run(short, claims) is None, "a page less has none in the first step"
        short.close()
