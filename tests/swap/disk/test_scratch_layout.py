"""The scratch file's extents: first fit in the first step, planned from then on, never overlapping."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from memo.swap.disk import DiskExtent, RawFile
from memo.swap.disk.raw_file import BLOCK_ALIGN
from memo.swap.disk.scratch import ScratchSpace

BLOCKS = 64


@pytest.fixture(params=["fixed", "growing"])
def space(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ScratchSpace]:
    capacity = BLOCKS * BLOCK_ALIGN if request.param == "fixed" else None
    space = ScratchSpace([tmp_path], capacity, block_bytes=BLOCK_ALIGN, spare_bytes=0, open_file=RawFile)
    yield space
    space.close()


def play(space: ScratchSpace, calls: list[tuple[str, int]]) -> int:
    """Reserves (name, blocks), releases (name, 0); the end of the highest extent in blocks. Everything is released."""
    held: dict[str, DiskExtent] = {}
    top = 0
    for name, blocks in calls:
        if not blocks:
            space.release(held.pop(name))
            continue
        extent = space.reserve(blocks * BLOCK_ALIGN)
        assert extent is not None
        for other in held.values():
            assert extent.offset + extent.nbytes <= other.offset or other.offset + other.nbytes <= extent.offset
        held[name] = extent
        top = max(top, (extent.offset + extent.nbytes) // BLOCK_ALIGN)
    for extent in held.values():
        space.release(extent)
    return top


HOLED = [("a", 4), ("b", 4), ("a", 0), ("c", 6), ("b", 0), ("c", 0)]


def test_a_step_is_laid_out_without_the_holes_of_the_first(space: ScratchSpace) -> None:
    assert play(space, HOLED) == 14  # c does not fit where a was
    assert [play(space, HOLED) for _ in range(3)] == [10, 10, 10]  # b and c


def test_a_step_that_differs_is_served_all_the_same(space: ScratchSpace) -> None:
    play(space, HOLED)
    generator = random.Random(0)
    for _ in range(30):
        calls, held = [("first", 4)], ["first"]
        for number in range(12):
            calls.append((f"{number}", generator.randint(1, 4)))
            held.append(f"{number}")
            if generator.random() < 0.5:
                calls.append((held.pop(generator.randrange(len(held))), 0))
        play(space, calls)
        assert space.used == 0
    assert play(space, HOLED) <= 14


def test_nothing_is_reserved_for_nothing(space: ScratchSpace) -> None:
    with pytest.raises(ValueError, match="cannot reserve 0"):
        space.reserve(0)


class Owner:
    """Hands its extent to `left` when it is collected, as a saved storage does whose last handle was in a cycle."""

    def __init__(self, extent: DiskExtent, left: list[DiskExtent]) -> None:
        self.extent, self.left, self.cycle = extent, left, self

    def __del__(self) -> None:
        self.left.append(self.extent)


@pytest.mark.parametrize("between", [False, True], ids=["at once", "after others took the room"])
def test_an_extent_that_a_garbage_collection_found_in_a_cycle_is_released_as_any_other(
    space: ScratchSpace, between: bool
) -> None:
    """The collection clears weak references to it before its owner hands it on."""
    left: list[DiskExtent] = []
    extent = space.reserve(BLOCK_ALIGN)
    assert extent is not None
    offset = extent.offset
    owner = Owner(extent, left)
    del extent, owner
    gc.collect()
    taken = [space.reserve(BLOCK_ALIGN)] if between else []
    space.release(left.pop())
    taken += [space.reserve(BLOCK_ALIGN) for _ in range(3)]
    offsets = [extent.offset for extent in taken if extent is not None]
    assert offset in offsets
    assert len(set(offsets)) == len(taken)
    assert space.used == len(taken) * BLOCK_ALIGN
