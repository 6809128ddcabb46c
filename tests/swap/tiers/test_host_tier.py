"""The end of the host tier."""

from __future__ import annotations

import gc

from hypothesis import given, settings, strategies as st
from race_checker import CheckingBackend

from memo.swap import whole_pages
from memo.swap.backends import CpuBackend
from memo.swap.tiers import Extent, HostTier
from memo.swap.tiers.host_and_disk import PAGE


def test_host_memory_is_given_back_after_the_copies_that_use_it() -> None:
    backend = CheckingBackend("lazy")
    tier = HostTier(backend, 1 << 20)
    extent = tier.reserve(4096)
    assert extent is not None
    source = backend.empty(4096)
    out = tier.write(extent, source, after=backend.compute_event())
    assert not out.query()
    tier.close()
    assert out.query()


class Owner:
    """Hands its extent to `left` when it is collected, as a saved storage does whose last handle was in a cycle."""

    def __init__(self, extent: Extent, left: list[Extent]) -> None:
        self.extent, self.left, self.cycle = extent, left, self

    def __del__(self) -> None:
        self.left.append(self.extent)


def test_a_place_that_a_garbage_collection_found_in_a_cycle_frees_no_other() -> None:
    """The collection clears weak references to it before its owner hands it on: the step's end takes it for lost."""
    tier = HostTier(CheckingBackend("lazy"), 1 << 20)
    left: list[Extent] = []
    extent = tier.reserve(4096)
    assert extent is not None
    owner = Owner(extent, left)
    del extent, owner
    gc.collect()
    tier.end_step()
    first = tier.reserve(4096)
    tier.release(left.pop())
    second = tier.reserve(4096)
    assert first is not None
    assert second is not None
    assert first.room.offset != second.room.offset
    assert tier.used == 2 * 4096
    tier.close()


def run(tier: HostTier, sizes: list[int]) -> bool:
    """Reserves what a forward moves, and releases it as backward does, the last one first; False without room for all."""
    held = [tier.reserve(nbytes) for nbytes in sizes]
    for extent in filter(None, reversed(held)):
        tier.release(extent)
    tier.end_step()
    return None not in held


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 6 * PAGE), min_size=1, max_size=14))
def test_whole_pages_are_just_the_budget_that_a_forward_needs(sizes: list[int]) -> None:
    needed = sum(map(whole_pages, sizes))
    tier = HostTier(CpuBackend(), needed, segment_bytes=PAGE)
    assert run(tier, sizes)
    assert run(tier, sizes)
    assert tier.reserved == needed
    tier.close()
    if needed > PAGE:
        short = HostTier(CpuBackend(), needed - PAGE, segment_bytes=PAGE)
        assert not run(short, sizes)
        short.close()
