"""What an error for want of memory advises, followed word for word at real sizes: the training then fits."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from memo.rehearsal import Rehearsal, SimulatedMachine, Way, hugging_face_step, rehearse

GIB = 1 << 30
QWEN = "qwen3-0.6b"


def rehearsed(
    model: str = QWEN,
    *,
    tokens: int = 65536,
    layers: int | None = 4,
    lora: int = 0,
    logits: bool = False,
    gpus: int = 1,
    disk_gib: int = 0,
    **options: Any,
) -> Rehearsal:
    build = hugging_face_step(model, lora=lora, layers=layers, without_logits=not logits)
    machine = SimulatedMachine("h100", host_bytes=124 * GIB, disk_bytes=disk_gib * GIB, ranks=gpus)
    return rehearse(functools.partial(build, batch=1, tokens=tokens), machine, **options)


def advice(found: Rehearsal) -> str:
    assert found.failure is not None
    assert not found.has_room
    return found.failure


def test_logits_that_do_not_fit() -> None:
    said = advice(rehearsed(tokens=131072, logits=True, steps=1))
    assert "Compute the loss without logits: memo.loss_without_logits(model)" in said
    assert rehearsed(tokens=131072, steps=1).fits


def test_activations_that_do_not_fit() -> None:
    kept = {"alpha": 1.0, "host": "3GiB"}
    said = advice(rehearsed(layers=28, steps=1, way=Way.KEEP))
    assert "out of memory" in said
    assert rehearsed(layers=28, steps=1).fits
    said = advice(rehearsed(**kept, steps=1))
    for words, change in (
        ("raise the host budget", {"host": "20GiB"}),
        ("give disk=...", {"disk_gib": 64}),
        ("a smaller alpha", {"alpha": 0.0}),
        ("on_full='recompute'", {"on_full": "recompute"}),
    ):
        assert words in said
        followed = rehearsed(**(kept | change), steps=2)
        assert followed.fits, (words, followed.failure, followed.violations)


def test_a_device_budget_that_no_plan_fits() -> None:
    said = advice(rehearsed(device="4GiB"))
    named = re.search(r"it takes more than ([\d.]+) GiB, or a shorter sequence", said)
    assert named is not None, said
    measured = rehearsed(device=f"{1.05 * float(named[1]):.3f}GiB")  # it was a lower bound: nothing had run yet
    needs = re.compile(r"needs device='([\d.]+GiB)' or more")
    (device,) = {found[1] for said in measured.warned if (found := needs.search(said))}
    followed = rehearsed(device=device)
    assert followed.settled
    assert followed.steps[-1].device_bytes <= followed.device_budget
    assert max(step.device_bytes for step in followed.steps) <= 1.01 * followed.device_budget
    shorter = rehearsed(tokens=16384, device="4GiB")
    assert shorter.fits, (shorter.failure, shorter.violations)


def test_states_that_do_not_fit() -> None:
    states = {"tokens": 4096, "layers": None, "steps": 1}
    assert "out of memory" in advice(rehearsed("qwen3-14b", **states))
    assert rehearsed("qwen3-14b", **states, gpus=8).fits
    pytest.importorskip("peft")
    assert rehearsed("qwen3-14b", **states, lora=16).fits
