"""One rank of a group whose other ranks do not exist: what it holds is learned without any of them.

Owns the process group of such a rank, which is torch's fake one: its collectives are over at once and move nothing, so
what they give has the right shape and no meaning. Nothing can be learned there that depends on numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

from memo.parallel.layout import Layout
from memo.parallel.world import World

__all__ = ["simulated_rank"]


@contextlib.contextmanager
def simulated_rank(layout: Layout) -> Iterator[World]:
    """The first of the layout's ranks, as long as the block runs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        yield World.of(layout, "cpu")
    finally:
        dist.destroy_process_group()
