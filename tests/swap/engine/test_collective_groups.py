"""A recompute's collectives are held to the ranks that the forward's were among, by whatever name the group goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from memo.swap.recompute.axis.operators import group_of
from memo.swap.recompute.record.operator_log import Diverged, Reading, Script, Scripted

X = torch.ones(2, 3)
_OPS = torch.ops._c10d_functional
COLLECTIVES: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "all_reduce": lambda group: _OPS.wait_tensor(_OPS.all_reduce(X, "sum", group.group_name)),
    "all_gather": lambda group: _OPS.wait_tensor(_OPS.all_gather_into_tensor(X, 2, group.group_name)),
    "of_c10d": lambda group: dist.all_reduce(X.clone(), group=group),
}


@pytest.fixture(autouse=True)
def _four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def repeat(call: Callable[[dist.ProcessGroup], object], first: dist.ProcessGroup, second: dist.ProcessGroup) -> None:
    """Calls it once, and once more along the script of the first time."""
    script = Script([X])
    with Scripted(script):
        call(first)
    assert script.lines
    with Scripted(Reading(script, [X], fewer=None, here=lambda: 0)):
        call(second)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_another_group_of_the_same_ranks_is_the_same(name: str) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    assert first.group_name != second.group_name
    repeat(COLLECTIVES[name], first, second)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_group_of_other_ranks_is_refused_by_name(name: str) -> None:
    with pytest.raises(Diverged, match=r"with .*ranks \[0, 2\].* instead of .*ranks \[0, 1\]"):
        repeat(COLLECTIVES[name], dist.new_group([0, 1]), dist.new_group([0, 2]))


def test_what_only_waits_or_is_no_collective_has_no_group() -> None:
    assert group_of(_OPS.wait_tensor.default, (X,)) is None
    assert group_of(torch.ops.aten.relu.default, (X,)) is None
