"""Device memory of a simulated GPU: bytes in use, their peaks, and the error of a full device."""

from __future__ import annotations

import pytest
import torch

from memo.allocator import Segments, byteless_storage
from memo.rehearsal.memory import SimulatedDeviceMemory

MIB = 1 << 20


def test_a_storage_counts_from_its_creation_to_its_end() -> None:
    memory = SimulatedDeviceMemory(100 * MIB)
    first, second = byteless_storage(30), byteless_storage(20)
    memory.add(first)
    memory.add(second)
    assert (memory.used, memory.peak, memory.step_peak) == (50, 50, 50)
    del first
    assert (memory.used, memory.peak) == (20, 50)


def test_each_reader_restarts_its_own_peak() -> None:
    memory = SimulatedDeviceMemory(100 * MIB)
    first, second = byteless_storage(30), byteless_storage(10)
    memory.add(first)
    del first
    memory.add(second)
    assert memory.restart()
    assert (memory.peak, memory.step_peak) == (10, 30)
    memory.begin_step()
    assert memory.step_peak == 10


def test_what_has_no_room_raises_and_is_not_counted() -> None:
    memory = SimulatedDeviceMemory(100 * MIB)
    kept = byteless_storage(60 * MIB)
    memory.add(kept)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 41 MiB\..* 60 MiB is allocated"):
        memory.add(byteless_storage(41 * MIB))
    assert memory.used == memory.peak == 60 * MIB
    exact = byteless_storage(40 * MIB)
    memory.add(exact)
    assert memory.used == memory.capacity


@pytest.mark.parametrize(("segments", "fits"), [(Segments.FIXED, False), (Segments.EXPANDABLE, True)])
def test_gaps_between_storages_count(segments: Segments, fits: bool) -> None:
    memory = SimulatedDeviceMemory(100 * MIB, segments)
    storages = [byteless_storage(size * MIB) for size in (60, 40)]
    for each in storages:
        memory.add(each)
    del storages[0], each
    small = byteless_storage(20 * MIB)
    memory.add(small)  # in the first one's segment
    del storages[0]
    both = byteless_storage(80 * MIB)
    if fits:
        memory.add(both)
    else:
        with pytest.raises(torch.OutOfMemoryError, match=r"20 MiB is allocated by PyTorch, and 40 MiB"):
            memory.add(both)


def test_empty_storages_take_nothing() -> None:
    memory = SimulatedDeviceMemory(0)
    memory.add(byteless_storage(0))
    assert memory.used == memory.reserved == 0
