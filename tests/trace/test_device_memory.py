"""The stack of the device's memory: bands add up to the measured total, and holders to the stack."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from memo.events import CounterEvent, Owned, Owner, StateChange, StepMark, TensorState, TierName
from memo.trace import Trace, device_stack, largest_holders
from memo.trace.tensor_lifetimes import lifetimes_of


def saved(t: int, ident: int, nbytes: int, layer: str) -> StateChange:
    return StateChange(
        t=t,
        step=0,
        id=ident,
        to=TensorState.LIVE,
        nbytes=nbytes,
        module=layer,
        shape=(nbytes,),
        dtype="uint8",
        op="Addmm",
        line="model.py:3 forward",
    )


def count(t: int, nbytes: int, *, step: int = 0) -> CounterEvent:
    return CounterEvent(t=t, step=step, tier=TierName.DEVICE, nbytes=nbytes)


EVENTS = [
    StepMark(t=0, step=0, phase="begin"),
    Owned(t=0, step=0, owner=Owner.WEIGHTS, nbytes=100),
    Owned(t=0, step=0, owner=Owner.WEIGHTS, nbytes=80, module="head.weight", shape=(8, 10), dtype="uint8"),
    count(1, 130),  # 30 that nobody knows of
    saved(2, 1, 40, "layers.0"),
    count(3, 190),  # 20 transient
    saved(4, 2, 20, "layers.1"),  # was transient at the sample before
    count(5, 190),
    StateChange(t=6, step=0, id=1, to=TensorState.GONE, nbytes=40),
    count(7, 150),
    StepMark(t=8, step=0, phase="end"),
]


def test_the_stack_is_as_high_as_each_sample(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace(EVENTS)
    memory = device_stack(trace.events, lifetimes_of(trace.events))
    assert memory.bands == ("other", "weights", "layers.0", "layers.1", "transient")
    for event in EVENTS:
        if isinstance(event, CounterEvent):
            assert sum(memory.at(event.t).values()) == event.nbytes
    assert memory.at(3) == {"other": 30, "weights": 100, "layers.0": 40, "transient": 20}
    assert memory.at(4) == {"other": 30, "weights": 100, "layers.0": 40, "layers.1": 20}  # not counted twice
    assert memory.at(7) == {"other": 30, "weights": 100, "layers.1": 20}
    assert memory.peak() == 3
    assert memory.peak((5, 8)) == 5
    assert (memory.peak((6, 8)), memory.peak((20, 30))) == (6, 20)


@pytest.mark.promise("P4")
def test_holders_add_up_to_the_stack(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace(EVENTS)
    lifetimes = lifetimes_of(trace.events)
    memory = device_stack(trace.events, lifetimes)
    found = largest_holders(trace.events, lifetimes, memory, 3)
    assert [(one.what, one.name, one.nbytes) for one in found] == [
        ("weights", "head.weight", 80),
        ("saved", "layers.0", 40),
        ("other", "", 30),
        ("weights", "smaller tensors", 20),
        ("transient", "", 20),
    ]
    assert sum(one.nbytes for one in found) == 190
    assert (found[1].op, found[1].shape, found[1].line) == ("Addmm", (40,), "model.py:3 forward")
    assert len(largest_holders(trace.events, lifetimes, memory, 3, count=2)) == 2


def test_each_step_has_a_rest_of_its_own(make_trace: Callable[..., Trace]) -> None:
    later = [StepMark(t=10, step=1, phase="begin"), count(11, 300, step=1), count(12, 260, step=1)]
    trace = make_trace([*EVENTS, *later])
    memory = device_stack(trace.events, lifetimes_of(trace.events))
    assert memory.at(11) == {"other": 140, "weights": 100, "layers.1": 20, "transient": 40}
    assert memory.at(7)["other"] == 30


def test_without_samples_the_stack_has_only_what_is_known(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace([event for event in EVENTS if not isinstance(event, CounterEvent)])
    memory = device_stack(trace.events, lifetimes_of(trace.events))
    assert memory.at(memory.peak()) == {"weights": 100, "layers.0": 40, "layers.1": 20}


def test_an_imagined_run_is_never_higher_than_measured(synthetic: ModuleType, make_trace: Callable[..., Trace]) -> None:
    trace = make_trace(synthetic.Run(synthetic.Workload(layers=6, steps=2)).run())
    lifetimes = lifetimes_of(trace.events)
    memory = device_stack(trace.events, lifetimes)
    samples = [event for event in trace.events if isinstance(event, CounterEvent) and event.tier is TierName.DEVICE]
    assert len(samples) > 20
    for sample in samples:
        assert sum(memory.at(sample.t).values()) == sample.nbytes
    assert all(nbytes >= 0 for sample in samples for nbytes in memory.at(sample.t).values())
