"""Records of a storage go with the storage object, never with its address."""

from __future__ import annotations

import gc
import sys
from weakref import ref

import pytest
import torch

from memo.swap.storage_map import StorageMap


def storage() -> torch.UntypedStorage:
    return torch.zeros(64).untyped_storage()


def test_an_entry_goes_when_its_storage_dies_and_not_before() -> None:
    identities = StorageMap()
    tensor = torch.zeros(64)
    identities[tensor.untyped_storage()] = "known"
    view = tensor[8:].view(7, 8)
    del tensor
    assert identities.find(ref(view.untyped_storage())) == "known"
    del view
    assert len(identities) == 0


def test_a_second_entry_replaces_the_first_and_still_goes_with_the_storage() -> None:
    identities = StorageMap()
    first = storage()
    identities[first] = 1
    identities[first] = 2
    assert (len(identities), identities.find(ref(first))) == (1, 2)
    del first
    assert len(identities) == 0


@pytest.mark.parametrize("brief", [False, True])
def test_memory_that_is_used_again_is_not_taken_for_what_was_there_before(brief: bool) -> None:
    identities = StorageMap(brief=brief)
    addresses = set()
    for _ in range(50):
        one = torch.empty(1 << 20).untyped_storage()
        addresses.add(one.data_ptr())
        assert identities.find(ref(one)) is None
        identities[one] = object()
        del one
    assert len(addresses) < 50, "the allocator gives the same memory again, or this shows nothing"
    assert len(identities) == (50 if brief else 0)


def test_brief_ones_go_at_once_with_what_they_know() -> None:
    """Tensors that a forward noted must not wait for the garbage collector."""
    gc.disable()
    try:
        identities = StorageMap(brief=True)
        held = storage()
        identities[storage()] = known = {"its result": 1.0}
        identities[held] = known
        before = sys.getrefcount(known)
        del identities
        assert sys.getrefcount(known) == before - 2
    finally:
        gc.enable()
