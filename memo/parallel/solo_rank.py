"""Simulated rank: one rank of a layout runs alone, to measure its memory or to list its collectives.

Owns its process group, which is torch's fake one: collectives return at once and move nothing, so their results have
the right shapes and meaningless values.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch.distributed as dist

from memo.parallel.layout import Layout
from memo.parallel.world import World
from memo.torch_private import (
    FakeStore,
    clear_fast_path_sharding_prop_cache,
    clear_python_sharding_prop_cache,
    clear_sharding_prop_cache,
)


@contextlib.contextmanager
def simulated_rank(layout: Layout, rank: int = 0) -> Iterator[World]:
    """Simulates one of the layout's ranks for the block, on the CPU.

    The process must have no process group; the fake one is destroyed at the end.
    """
    with fake_group(layout.ranks, rank):
        yield World.of(layout, "cpu")


@contextlib.contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Gives the process one rank's place in torch's fake process group for the block; it must have none."""
    hook = sys.excepthook  # torch replaces it, and each group's replacement would call the one before
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        _forget_shapes()


def _forget_shapes() -> None:
    """Empties DTensor's caches, which have local shapes of this rank under a key that other ranks have, too."""
    for clear in (
        clear_sharding_prop_cache,
        clear_python_sharding_prop_cache,
        clear_fast_path_sharding_prop_cache,
    ):
        if clear is not None:
            clear()
