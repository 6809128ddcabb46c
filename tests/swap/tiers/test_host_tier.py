"""The end of the host tier."""

from __future__ import annotations

from race_checker import CheckingBackend

from memo.swap.tiers.host_and_disk import HostTier


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
