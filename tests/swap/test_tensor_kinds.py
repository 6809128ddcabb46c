"""Which tensors are a parameter's memory, also where data parallelism frees that memory before a copy has read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from memo.swap import parameter_behind


@pytest.fixture
def sharded() -> Iterator[Callable[[torch.Tensor], Any]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor: DTensor.from_local(tensor, mesh, [Shard(0)])
    dist.destroy_process_group()


class Same(torch.autograd.Function):
    """A function of the program's own that returns a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda local: local,
    "transposed": lambda local: local.mT,
    "one of a list": lambda local: local.unbind(0)[1],
    "diagonal": lambda local: local.diagonal(dim1=1, dim2=2),
    "windows": lambda local: local.unfold(2, 4, 2),
    "own function": lambda local: Same.apply(local, 2.0).unbind(0)[0],  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("view", list(VIEWS.values()), ids=list(VIEWS))
def test_any_view_of_a_sharded_parameters_local_part_is_the_parameter(
    sharded: Callable[[torch.Tensor], Any], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    parameter = nn.Parameter(sharded(torch.randn(2, 8, 8)))
    local: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
    assert parameter_behind(view(local)) is parameter


@pytest.mark.parametrize("view", list(VIEWS.values()), ids=list(VIEWS))
def test_a_view_of_a_sharded_activations_local_part_is_none(
    sharded: Callable[[torch.Tensor], Any], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """It is made by one operator of one input, as a parameter's are."""
    parameter = nn.Parameter(sharded(torch.randn(2, 8, 8)))
    assert parameter_behind(view(parameter.sin().to_local())) is None  # type: ignore[attr-defined]


def test_what_is_computed_of_a_sharded_parameter_is_none(sharded: Callable[[torch.Tensor], Any]) -> None:
    parameter = nn.Parameter(sharded(torch.randn(2, 8, 8)))
    local: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
    assert parameter_behind(local.sin()) is None
    assert parameter_behind(local.unbind(0)[0].exp()) is None


class InOwnMemory(torch.autograd.Function):
    """A function of the program's own that returns a view of memory which it allocates."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone().view(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_a_view_of_memory_that_a_function_allocates_is_no_parameter(sharded: Callable[[torch.Tensor], Any]) -> None:
    table = nn.Embedding(8, 4)
    embedded = InOwnMemory.apply(table(torch.tensor([1, 2])))  # type: ignore[no-untyped-call]
    assert parameter_behind(embedded) is None
    parameter = nn.Parameter(sharded(torch.randn(2, 8, 8)))
    assert parameter_behind(InOwnMemory.apply(parameter.to_local())) is None  # type: ignore[attr-defined, no-untyped-call]
