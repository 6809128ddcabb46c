"""The end of the host tier."""

from __future__ import annotations

import gc

from race_checker import CheckingBackend

from memo.swap.tiers.host_and_disk import HostTier
from memo.swap.tiers.protocol import Place


def test_host_memory_is_given_back_after_the_copies_that_use_it() -> None:
    backend = CheckingBackend("lazy")
    tier = HostTier(backend, 1 << 20)
    place = tier.claim(4096)
    assert place is not None
    source = backend.empty(4096)
    out = place.copy_out(source, after=backend.compute_event())
    assert not out.query()
    tier.close()
    assert out.query()


class Owner:
    """Hands its place to `left` when it is collected, as a saved storage does whose last handle was in a cycle."""

    def __init__(self, place: Place, left: list[Place]) -> None:
        self.place, self.left, self.cycle = place, left, self

    def __del__(self) -> None:
        self.left.append(self.place)


def test_a_place_that_a_garbage_collection_found_in_a_cycle_frees_no_other() -> None:
    """The collection clears weak references to it before its owner hands it on: the step's end takes it for lost."""
    tier = HostTier(CheckingBackend("lazy"), 1 << 20)
    left: list[Place] = []
    place = tier.claim(4096)
    assert place is not None
    owner = Owner(place, left)
    del place, owner
    gc.collect()
    tier.end_step()
    first = tier.claim(4096)
    left.pop().release()
    second = tier.claim(4096)
    assert first is not None
    assert second is not None
    assert first.offset != second.offset  # type: ignore[attr-defined]
    assert tier.used == 2 * 4096
    tier.close()
