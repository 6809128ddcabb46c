"""The process group that a collective is given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from memo.swap.recompute.tape.operators import group_of

X = torch.ones(2, 3)
_OPS = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def _four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_what_only_waits_or_is_no_collective_has_no_group() -> None:
    assert group_of(_OPS.wait_tensor.default, (X,)) is None
    assert group_of(torch.ops.aten.relu.default, (X,)) is None
