"""Rehearsed trainings of a small model: settled within budgets, by memo's own planner; errors of those that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memo.errors import RecordError, UsageError
from memo.events import TierName
from memo.record import Step
from memo.rehearsal import Rehearsal, RehearsedStep, SimulatedMachine, Way, hugging_face_step, rehearse
from memo.trace import read_traces

pytest.importorskip("transformers")

MIB, GIB = 1 << 20, 1 << 30
SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 1024,
}
LAYER = 4 * 512 * 512 + 3 * 512 * 2048 + 2 * 512
PARAMETERS = 4 * LAYER + 2 * 1024 * 512 + 512


def small(machine: SimulatedMachine | None = None, *, tokens: int = 8192, **options: Any) -> Rehearsal:
    build = hugging_face_step(SMALL, without_logits=True)
    machine = machine or SimulatedMachine("rtx4090", host_bytes=8 * GIB)
    return rehearse(functools.partial(build, batch=1, tokens=tokens), machine, **options)


def test_a_planned_training_settles_within_all_budgets() -> None:
    seen: list[RehearsedStep] = []
    found = small(device="900MiB", on_step=seen.append)
    assert found.fits
    assert found.settled
    assert found.settled_after == 4
    assert tuple(seen) == found.steps
    assert [step.number for step in found.steps] == list(range(len(found.steps)))
    assert all(step.device_bytes <= 900 * MIB for step in found.steps)
    last = found.steps[-1]
    assert last.is_settled
    assert last.moved_bytes > 0
    assert last.trials == 0 < found.steps[0].trials
    assert (found.device_budget, found.host_budget) == (900 * MIB, int(0.7 * 8 * GIB))
    assert found.settling_s is not None
    assert 0 < found.settling_s < 4 * last.seconds
    assert "recompute" in found.report


def test_the_same_training_is_rehearsed_alike_twice() -> None:
    assert small(device="900MiB", steps=4).steps == small(device="900MiB", steps=4).steps


def test_before_the_first_step_the_device_has_parameters_and_adams_state() -> None:
    found = small(steps=1)
    assert found.static_bytes == pytest.approx(3 * 2 * PARAMETERS, rel=0.01)
    assert small(steps=1, optimizer=None).static_bytes == pytest.approx(2 * PARAMETERS, rel=0.01)


def test_what_fits_is_left_alone_and_as_fast_as_without_memo() -> None:
    planned, kept = small(), small(way=Way.KEEP, steps=2)
    assert planned.steps[-1].moved_bytes == 0
    assert "everything fits and is kept" in planned.steps[-1].decision
    assert planned.step_s == pytest.approx(kept.step_s, rel=0.02)
    assert planned.steps[-1].device_bytes == pytest.approx(kept.steps[-1].device_bytes, rel=0.02)


def test_checkpointing_is_slower_and_smaller_than_keeping_all() -> None:
    kept, whole = small(way=Way.KEEP, steps=2), small(way=Way.CHECKPOINT, steps=2)
    assert (kept.settled_after, whole.settled_after) == (0, 0)
    assert kept.step_s is not None
    assert whole.step_s is not None
    assert 1.15 * kept.step_s < whole.step_s < 1.4 * kept.step_s
    assert whole.steps[-1].device_bytes < 0.7 * kept.steps[-1].device_bytes


def test_a_disk_takes_what_the_host_has_no_room_for() -> None:
    machine = SimulatedMachine(
        "rtx4090", host_bytes=8 * GIB, disk_bytes=GIB, disk_write_bytes_per_s=20e9, disk_read_bytes_per_s=20e9
    )
    found = small(machine, host="64MiB", alpha=1.0, steps=2)
    assert found.fits
    assert 0 < found.steps[-1].host_bytes <= 64 * MIB
    assert found.steps[-1].disk_bytes > 0
    assert found.disk_budget == GIB
    slow = SimulatedMachine(
        "rtx4090", host_bytes=8 * GIB, disk_bytes=GIB, disk_write_bytes_per_s=1e9, disk_read_bytes_per_s=1e9
    )
    slower = small(slow, host="64MiB", alpha=1.0, steps=2)
    assert found.step_s is not None
    assert slower.step_s is not None
    assert slower.step_s > found.step_s + 0.5 * slower.steps[-1].disk_bytes * (2 / 1e9 - 2 / 20e9)


def test_a_full_host_tier_ends_the_rehearsal_and_says_so() -> None:
    found = small(host="64MiB", alpha=1.0)
    assert not found.fits
    assert not found.has_room
    assert found.failure is not None
    assert found.failure.startswith("no room for ")
    assert found.steps == ()


def test_a_model_larger_than_the_device_is_a_failure_of_room() -> None:
    build = hugging_face_step("llama-3-8b")
    found = rehearse(functools.partial(build, batch=1, tokens=64), SimulatedMachine("rtx4090"))
    assert not found.has_room
    assert found.failure is not None
    assert "out of memory" in found.failure
    assert found.static_bytes == 0


def test_a_step_that_exceeds_the_device_budget_is_named() -> None:
    found = small(device="300MiB", steps=1, alpha=0.0)
    assert not found.fits
    (violation,) = found.violations
    assert (violation.step, violation.tier, violation.budget_bytes) == (0, TierName.DEVICE, 300 * MIB)
    assert violation.used_bytes == found.steps[0].device_bytes
    assert str(violation).startswith("step 0 took ")


def test_lengths_take_turns_and_all_of_them_settle() -> None:
    found = small(lengths=[2048, 8192], tokens=8192)
    assert found.settled
    assert {step.tokens for step in found.steps[-2:]} == {2048, 8192}
    by_tokens = {step.tokens: step.seconds for step in found.steps}
    assert by_tokens[8192] > 2 * by_tokens[2048]


def test_trials_are_those_of_the_step_also_where_another_length_recomputes_nothing() -> None:
    found = small(lengths=[2048, 8192], device="700MiB", host="300MiB", steps=8)
    assert [step.recompute_s > 0 for step in found.steps[4:]] == [False, True] * 2
    assert [step.trials for step in found.steps[4:]] == [0] * 4


def test_microbatches_of_a_step_take_their_time_each() -> None:
    one, two = (small(way=Way.KEEP, accumulate=n, optimizer=None, steps=2).step_s for n in (1, 2))
    assert one is not None
    assert two == pytest.approx(2 * one, rel=0.05)


def test_an_attached_manager_gives_the_same_steps() -> None:
    around, attached = small(device="900MiB"), small(device="900MiB", attach=True)
    assert attached.settled
    assert attached.step_s == pytest.approx(around.step_s, rel=0.02)


def test_adapters_alone_are_trained() -> None:
    pytest.importorskip("peft")
    build = hugging_face_step(SMALL, lora=8, without_logits=True, layers=2)
    found = rehearse(functools.partial(build, batch=1, tokens=1024), SimulatedMachine("rtx4090"), steps=1)
    linears = 4 * 8 * (512 + 512) + 3 * 8 * (512 + 2048)  # of a layer
    weights = 2 * LAYER + 2 * 1024 * 512 + 512
    assert found.static_bytes == pytest.approx(2 * weights + 4 * 3 * 2 * linears, rel=0.01)


def test_a_trace_of_a_rehearsal_is_read_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    found = small(device="900MiB", steps=3, trace=str(path))
    (trace,) = read_traces([path])
    assert not trace.remarks
    assert trace.meta["hardware"] == "rtx4090, simulated"
    assert trace.meta["link_bytes_per_s"] == {"d2h": 25e9, "h2d": 25e9}
    assert {event.step for event in trace.events} >= {0, 1, 2}
    assert found.steps[0].moved_bytes > 0


def stepping(loss: Callable[[torch.nn.Module], Any]) -> Callable[[], Step]:
    def build() -> Step:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        return Step(model=model, loss=lambda: loss(model), layers=list(model))

    return build


def test_what_is_wrong_with_a_step_is_raised() -> None:
    def reads(model: torch.nn.Module) -> torch.Tensor:
        loss = model(torch.zeros(8, 64)).sum()
        return loss if loss.item() > 0 else -loss

    with pytest.raises(RecordError, match="--assume"):
        rehearse(stepping(reads), SimulatedMachine("h100"))
    assert rehearse(stepping(reads), SimulatedMachine("h100", assume=1.0), steps=1).fits
    with pytest.raises(RecordError, match="ZeroDivisionError"):
        rehearse(stepping(lambda model: 1 / 0), SimulatedMachine("h100"))
    with pytest.raises(UsageError, match="takes no tokens"):
        rehearse(stepping(lambda model: model(torch.zeros(8, 64)).sum()), SimulatedMachine("h100"), lengths=[8])
    with pytest.raises(UsageError, match="at least one step"):
        small(steps=0)


def test_a_machine_has_its_presets_share_or_what_is_given() -> None:
    assert SimulatedMachine("H100").free_host_bytes() == 2048 * GIB // 8
    assert SimulatedMachine("H100", host_bytes=GIB).free_host_bytes() == GIB
    with pytest.raises(UsageError, match="unknown GPU"):
        SimulatedMachine("h900")
    with pytest.raises(UsageError, match="needs rates"):
        SimulatedMachine("h100", disk_bytes=GIB, disk_write_bytes_per_s=0)


def test_models_that_do_not_exist_are_named() -> None:
    with pytest.raises(UsageError, match="unknown model 'llama-9-8b'"):
        hugging_face_step("llama-9-8b")
    with pytest.raises(UsageError, match="less than 1"):
        hugging_face_step("llama-3-8b", layers=0)
