"""A manager attached to a model that something wraps, before or after: it works, whichever of the two is given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import Stack, assert_equal, ids, plain, stack, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import memo
from memo.parallel.tensor_parallel import ColumnParallel
from memo.swap import local_part

ALPHAS = [1.0, 0.0]


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def attached(model: nn.Module, alpha: float) -> memo.Manager:
    return memo.offload(model, alpha=alpha, host="8MiB", min_bytes=512).attach()


def ends_well(manager: memo.Manager, model: nn.Module) -> None:
    assert manager.stats.packed > 0
    manager.close()
    ours = (
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if type(hook).__module__.startswith("memo")
    )
    assert list(ours) == []


class Adapted(nn.Module):
    """As PEFT wraps a model: the wrapper's forward calls the model's."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any) -> torch.Tensor:
        loss: torch.Tensor = self.base(*args)
        return loss


WRAPPERS: dict[str, Callable[[Stack], nn.Module]] = {
    "adapted": Adapted,
    "ddp": DistributedDataParallel,
    "data parallel": nn.DataParallel,
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("given", ["wrapped", "inner", "inner, then wrapped"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models(wrapper: str, alpha: float, given: str) -> None:
    model = stack()
    if given == "inner, then wrapped":
        manager = attached(model, alpha)
        wrapped = WRAPPERS[wrapper](model)
    else:
        wrapped = WRAPPERS[wrapper](model)
        manager = attached(wrapped if given == "wrapped" else model, alpha)
    assert_equal(train(wrapped, lambda step: wrapped(ids(step))), plain())
    ends_well(manager, wrapped)


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", ["attached", "sharded"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_fully_sharded_models(alpha: float, first: str) -> None:
    def sharded(model: Stack) -> Stack:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model

    def losses(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for step in range(3):
            loss = model(ids(step))
            loss.backward()
            found += [
                loss.detach(),
                *(one.grad.to_local().clone() for one in model.parameters() if one.grad is not None),
            ]  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
        return found

    model = stack()
    if first == "sharded":
        sharded(model)
    manager = attached(model, alpha)
    if first == "attached":
        sharded(model)
    got, want = losses(model), losses(sharded(stack()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ends_well(manager, model)


def test_a_sharded_model_that_is_evaluated_in_inference_mode_is_planned_and_traced_on(tmp_path: Path) -> None:
    """A DTensor cannot be detached in inference mode: found by `make hunt`."""

    def losses(manager: Any = None) -> list[torch.Tensor]:
        model = stack()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        opened = manager(model) if manager else contextlib.nullcontext()
        found = []
        for step in range(3):
            with opened:
                loss = model(ids(step))
            loss.backward()
            model.zero_grad()
            with torch.inference_mode(), opened:
                found += [loss.detach(), model(ids(step))]
        if manager:
            opened.close()
        return found

    def offloaded(model: nn.Module) -> memo.Manager:
        return memo.offload(model, alpha=0.5, host="8MiB", device="64GiB", min_bytes=1, trace=tmp_path / "trace.jsonl")

    assert all(map(torch.equal, losses(offloaded), losses()))


@pytest.mark.filterwarnings("ignore:layers.0 and 2 more ran without hooks:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*ran without hooks:RuntimeWarning")
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "layer.compile"])
def test_compiled_models(how: str, alpha: float) -> None:
    def compiled(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        if how == "torch.compile":
            return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]
        for module in model.layers if how == "layer.compile" else [model]:  # type: ignore[union-attr]
            module.compile(backend="aot_eager")
        return model

    reference = compiled(stack())
    want = train(reference, lambda step: reference(ids(step)))
    model = compiled(stack())
    manager = attached(model, alpha)
    assert_equal(train(model, lambda step: model(ids(step))), want)
    if how == "layer.compile":
        assert manager.stats.packed > 0
    manager.close()
    assert_equal(train(reference, lambda step: reference(ids(step))), train(model, lambda step: model(ids(step))))


class Adapted(nn.Module):
    """A frozen matrix, which autograd saves without a history, and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear((x * self.scale).relu()) + x


@pytest.mark.parametrize(
    "style", [TorchColwise, functools.partial(ColumnParallel, sequence=False)], ids=["torch", "memo"]
)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_frozen_matrices_that_fsdp_gathers_and_frees_never_move(alpha: float, style: Any) -> None:
    """Divided by tensor parallelism, too, they are DTensors, whose gathered memory was copied while FSDP freed it."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))

    def run(*, divided: bool, offloaded: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(Adapted(), Adapted(), Adapted())
        for layer in model if divided else ():
            parallelize_module(layer, mesh["tp"], {"linear": style()})
            fully_shard(layer, mesh=mesh["dp"])
        manager = memo.offload(model, alpha=alpha, host="8MiB", min_bytes=1, layers=list(model)) if offloaded else None
        for _ in range(2):
            with manager or contextlib.nullcontext():
                loss = model(torch.ones(4, 64, requires_grad=True)).sum()
            loss.backward()
        moved = 0
        if manager is not None:
            moved = manager.stats.bytes_host
            manager.close()
        return [local_part(layer.scale.grad).clone() for layer in model], moved

    gradients, moved = run(divided=True, offloaded=True)
    assert all(map(torch.equal, gradients, run(divided=True, offloaded=False)[0]))
    assert 0 < moved <= run(divided=False, offloaded=True)[1]
