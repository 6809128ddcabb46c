"""What a program changes after a layer of what the layer was given, and of DTensors, whose local parts count nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from changed_layers import RECOMPUTES, between, by_recompute, same
from small_models import Stack, assert_equal, gradients, ids, stack, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from memo.errors import ModifiedAfterSave
from memo.swap.recompute.recorded_call import RecordedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import memo


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_parameter_must_not_change_before_backward(offload: Callable[..., memo.Manager]) -> None:
    """Its local part, which the replay reads, does not count changes of the whole."""
    model = stack(make=Split)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    manager = offload(model, alpha=0.0)
    train(model, lambda step: model(ids(step)), manager)
    assert manager.stats.bytes_recomputed > 0

    def adds(layer: Any) -> None:
        with torch.no_grad():
            layer.up.bias.add_(1.0)

    with pytest.raises(ModifiedAfterSave):
        between(model, manager, adds)


class Widens(nn.Module):
    """Autograd does not save its input: it widens it first, as norms of half precision do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.double(), (32,)).float()
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class AddsInPlace(Stack):
    """Changes what its layers were given, which is no error: nothing in the graph needs it."""

    from_call = 0
    calls = 0

    def __init__(self) -> None:
        super().__init__(make=Widens)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(ids)
        for layer in self.layers:
            if self.calls > self.from_call:
                x += layer(x)
            else:
                x = x + layer(x)
        return x.square().mean()


def adds_in_place() -> AddsInPlace:
    torch.manual_seed(0)
    return AddsInPlace()


@by_recompute
@pytest.mark.parametrize("parts", [1, 2])
def test_an_input_that_autograd_does_not_save_may_change(
    offload: Callable[..., memo.Manager], parts: int, how: dict[str, Any]
) -> None:
    """Also in the second forward of the first step, whose layers are known by then."""

    def forward(model: Stack) -> Callable[[int], torch.Tensor]:
        return lambda step: torch.stack([model(ids(parts * step + part)) for part in range(parts)]).sum()

    model, reference = adds_in_place(), adds_in_place()
    manager = offload(model, **how)
    assert_equal(train(model, forward(model), manager), train(reference, forward(reference)))
    assert manager.stats.bytes_recomputed > 0
    assert not manager._recompute_policy.refused


@pytest.mark.parametrize("how", [{"alpha": 0.0}, RECOMPUTES[2]], ids=["attention", "whole"])
def test_an_input_that_changes_later_than_in_the_first_calls_is_an_error_that_says_what_to_do(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    model = adds_in_place()
    model.from_call = 3
    manager = offload(model, **how)
    train(model, lambda step: model(ids(step)), manager)
    with manager:
        loss = model(ids(3))
    with pytest.raises(ModifiedAfterSave, match=r'move all that this layer saves: levels=\{"layers.\d": 1.0\}'):
        loss.backward()


@pytest.mark.parametrize("how", [{"alpha": 0.0}, *RECOMPUTES], ids=["attention", "tokens", "matmuls", "whole"])
def test_an_input_of_another_shape_may_change_from_its_first_call_on(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    def forward(model: AddsInPlace) -> Callable[[int], torch.Tensor]:
        model.from_call = 2
        return lambda step: model(ids(step, seq=48 if step < 2 else 32))

    model, reference = adds_in_place(), adds_in_place()
    manager = offload(model, **how)
    assert_equal(train(model, forward(model), manager, steps=4), train(reference, forward(reference), steps=4))
    assert manager.stats.bytes_recomputed > 0


@by_recompute
def test_an_input_that_does_not_change_is_copied_in_first_calls_alone(
    offload: Callable[..., memo.Manager], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[bool] = []
    plain_copy = RecordedCall._copied

    def watch(self: RecordedCall, tensor: torch.Tensor, number: int) -> torch.Tensor:
        copied.append(True)
        return plain_copy(self, tensor, number)

    monkeypatch.setattr(RecordedCall, "_copied", watch)
    model = adds_in_place()
    model.from_call = 1000
    manager = offload(model, **how)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    first = len(copied)
    train(model, lambda step: model(ids(step)), manager)
    assert len(copied) == first


class Sharded(Widens):
    """Is given a DTensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.layer_norm(x.to_local().double(), (32,)).float()  # type: ignore[operator]
        y = self.down(F.gelu(self.up(wide)))
        return DTensor.from_local(y, x.device_mesh, x.placements)  # type: ignore[attr-defined, no-any-return]


class AddsSharded(AddsInPlace):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = DTensor.from_local(self.embed(ids), self.mesh, [Replicate()])  # type: ignore[arg-type]
        for layer in self.layers:
            if self.calls > self.from_call:
                x += layer(x)
            else:
                x = x + layer(x)
        return x.to_local().square().mean()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("from_call", [0, 3])
@pytest.mark.parametrize("how", RECOMPUTES[1:], ids=["matmuls", "whole"])
def test_a_sharded_input_that_changes(
    offload: Callable[..., memo.Manager], from_call: int, how: dict[str, Any]
) -> None:
    """Its local part, which the replay reads, does not count changes of the whole."""

    def make() -> AddsSharded:
        torch.manual_seed(0)
        model = AddsSharded()
        model.layers = nn.ModuleList([Sharded() for _ in range(3)])
        model.mesh = init_device_mesh("cpu", (1,))  # type: ignore[assignment]
        model.from_call = from_call
        return model

    model, reference = make(), make()
    manager = offload(model, **how)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert manager.stats.bytes_recomputed > 0
    if from_call:
        with manager:
            loss = model(ids(3))
        try:
            loss.backward()
        except ModifiedAfterSave:
            return
        reference(ids(3)).backward()  # token ranges keep parts of the input in memory of their own
        assert same(gradients(model), gradients(reference))


class GivenSharded(nn.Module):
    """Is given a table as a DTensor, which autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, table: Any) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x.sin() + table.to_local())))  # type: ignore[no-any-return]


class GivesSharded(Stack):
    def __init__(self) -> None:
        super().__init__(make=GivenSharded)
        self.table = DTensor.from_local(torch.ones(32), init_device_mesh("cpu", (1,)), [Replicate()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.table)
        return x.square().mean()


@pytest.mark.usefixtures("one_rank")
@by_recompute
def test_a_sharded_argument_must_not_change_before_backward(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = GivesSharded()
    manager = offload(model, **how)
    train(model, lambda step: model(ids(step)), manager)
    assert manager.stats.bytes_recomputed > 0
    with manager:
        loss = model(ids())
    model.table.add_(1.0)
    with pytest.raises(ModifiedAfterSave):
        loss.backward()
