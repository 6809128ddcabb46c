"""What a model keeps between steps is counted to the byte, and sampled into the trace."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import Stack
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import memo
from memo.events import CounterEvent, Event, Owned, Owner, StateChange, TierName
from memo.manager.device_memory import MemorySampler, OwnedMemory
from memo.trace import read_traces

CPU = torch.device("cpu")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack(layers=2)


@pytest.fixture
def owned(model: nn.Module) -> Iterator[OwnedMemory]:
    found = OwnedMemory(model, CPU)
    yield found
    found.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randint(0, 61, (1, 32))).backward()
    optimizer.step()


def test_weights_gradients_and_state_are_counted_once_each(model: nn.Module, owned: OwnedMemory) -> None:
    weights = sum(parameter.nbytes for parameter in model.parameters())
    model.tied = model.layers[0].up.weight
    model.register_buffer("mask", torch.zeros(100))
    assert owned.nbytes(Owner.WEIGHTS) == weights + 400
    assert owned.nbytes(Owner.GRADIENTS) == owned.nbytes(Owner.OPTIMIZER) == 0
    step(model, torch.optim.SGD(nn.Linear(2, 2).parameters()))  # another model's optimizer
    assert owned.nbytes(Owner.OPTIMIZER) == 0
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    assert owned.nbytes(Owner.GRADIENTS) == weights
    state = sum(value.nbytes for states in optimizer.state.values() for value in states.values())
    assert owned.nbytes(Owner.OPTIMIZER) == state > 2 * weights
    owned.begin_step()
    assert owned.gradient_nbytes() == weights
    optimizer.zero_grad()
    assert owned.nbytes(Owner.GRADIENTS) == owned.gradient_nbytes() == 0


def test_the_largest_are_named(model: nn.Module, owned: OwnedMemory) -> None:
    found = owned.largest(Owner.WEIGHTS)
    assert len(found) == 10
    assert [one.nbytes for one in found] == sorted((one.nbytes for one in found), reverse=True)
    assert found[0].module in ("layers.0.up.weight", "layers.0.down.weight")
    assert (found[0].shape, found[0].dtype) == ((128, 32), "float32")


class Events:
    """A tracer that keeps everything, with a clock that the test sets."""

    stacks = False

    def __init__(self) -> None:
        self.step = 0
        self.time = 0
        self.events: list[Event] = []

    def now(self) -> int:
        return self.time

    def at(self, monotonic_ns: int) -> int:
        return monotonic_ns

    def emit(self, event: Event) -> None:
        self.events.append(event)


def test_a_peak_between_two_samples_stands_halfway(owned: OwnedMemory) -> None:
    tracer = Events()
    used, peak = 100, 100
    sampler = MemorySampler(owned, tracer, used_bytes=lambda: used, peak_bytes=lambda: peak)
    tracer.time = 1_000_000
    sampler.sample()
    tracer.time, used, peak = 3_000_000, 120, 170
    sampler.sample()
    tracer.time, used = 3_100_000, 90
    sampler.at_change()  # too soon
    tracer.time = 5_000_000
    sampler.at_change()  # the same peak as before is none of this interval
    found = [(one.t, one.nbytes) for one in tracer.events if isinstance(one, CounterEvent)]
    assert found == [(1_000_000, 100), (2_000_000, 170), (3_000_000, 120), (5_000_000, 90)]


@pytest.mark.parametrize("stacks", [False, True])
def test_a_run_traces_all_of_it(model: nn.Module, stacks: bool, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    manager = memo.offload(model, alpha=1.0, min_bytes="1KiB", host="64MiB", trace=path, trace_stacks=stacks)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with manager:
            loss = model(torch.randint(0, 61, (1, 64)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step_done()
    manager.close()
    (trace,) = read_traces([path])
    weights = sum(parameter.nbytes for parameter in model.parameters())
    totals = [event for event in trace.events if isinstance(event, Owned) and event.module is None and event.step == 1]
    most = {owner: max(one.nbytes for one in totals if one.owner is owner) for owner in list(Owner)[:3]}
    assert most[Owner.WEIGHTS] == most[Owner.GRADIENTS] == weights
    assert most[Owner.OPTIMIZER] > 2 * weights
    assert any(isinstance(event, CounterEvent) and event.tier is TierName.DEVICE for event in trace.events)
    saved = [event for event in trace.events if isinstance(event, StateChange) and event.shape is not None]
    assert {"Addmm", "Gelu", "NativeLayerNorm"} <= {event.op for event in saved}
    lines = {event.line for event in saved}
    assert lines == {None} if not stacks else all(line and "small_models.py" in line for line in lines)


def test_a_manager_that_traces_is_collected_with_its_hook(model: nn.Module, tmp_path: Path) -> None:
    before = len(_global_optimizer_post_hooks)
    manager = memo.offload(model, alpha=1.0, min_bytes="1KiB", host="64MiB", trace=tmp_path / "t.jsonl")
    optimizer = torch.optim.AdamW(model.parameters())
    with manager:
        loss = model(torch.randint(0, 61, (1, 64)))
    loss.backward()
    optimizer.step()
    del manager, loss
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before
