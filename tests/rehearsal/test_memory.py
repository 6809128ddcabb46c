"""Device memory of a simulated GPU: bytes in use, their peaks, and the error of a full device."""

from __future__ import annotations

import pytest
import torch

from memo.allocator import byteless_storage
from memo.rehearsal.memory import DeviceMemory


def test_a_storage_counts_from_its_creation_to_its_end() -> None:
    memory = DeviceMemory(100)
    first, second = byteless_storage(30), byteless_storage(20)
    memory.add(first)
    memory.add(second)
    assert (memory.used, memory.peak, memory.step_peak) == (50, 50, 50)
    del first
    assert (memory.used, memory.peak) == (20, 50)


def test_each_reader_restarts_its_own_peak() -> None:
    memory = DeviceMemory(100)
    first, second = byteless_storage(30), byteless_storage(10)
    memory.add(first)
    del first
    memory.add(second)
    assert memory.restart()
    assert (memory.peak, memory.step_peak) == (10, 30)
    memory.begin_step()
    assert memory.step_peak == 10


def test_what_has_no_room_raises_and_is_not_counted() -> None:
    memory = DeviceMemory(100)
    kept = byteless_storage(60)
    memory.add(kept)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 41 B; 60 B of 100 B are in use"):
        memory.add(byteless_storage(41))
    assert memory.used == memory.peak == 60
    exact = byteless_storage(40)
    memory.add(exact)
    assert memory.used == memory.capacity


def test_empty_storages_take_nothing() -> None:
    memory = DeviceMemory(0)
    memory.add(byteless_storage(0))
    assert memory.used == memory.reserved == 0
