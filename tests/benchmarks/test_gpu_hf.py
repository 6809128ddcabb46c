"""The arm of gpu-bench for unmodified models, on a CPU and small: every way takes the same step, and defaults settle."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from benchmarks.gpu_hf import DEFAULTS, MOST_STEPS, SMALL, Task, best_flag_s, flops_of_step, measure, ways
from benchmarks.peers.ways import AXOLOTL, TRANSFORMERS_ATTENTION
from memo.errors import UsageError


@pytest.mark.parametrize("model", ["llama-3-8b+lora4", "qwen3-0.6b"])
def test_every_way_takes_the_same_step_and_defaults_settle(model: str) -> None:
    needing_an_accelerator = [TRANSFORMERS_ATTENTION, AXOLOTL]
    bodies: list[dict[str, Any]] = []
    task = Task(model=model, tokens=1024, fields=SMALL)
    body = measure(task, torch.device("cpu"), ways(), 1, lambda so_far: bodies.append(copy.deepcopy(so_far)))
    ran = [row for row in body["ways"] if row["failed"] is None]
    assert {row["way"] for row in body["ways"]} - {row["way"] for row in ran} == set(needing_an_accelerator)
    last = [(each["ways"][-1]["way"], "gradient_difference" in each["ways"][-1]) for each in bodies]
    assert last == [(row["way"], more) for row in body["ways"] for more in ((False, True) if row in ran else (False,))]
    assert {row["gradient_difference"] for row in ran} == {0.0}
    losses = {row["loss"] for row in ran}
    assert len(losses) == 1
    assert abs(losses.pop() - math.log(SMALL["vocab_size"])) < 1
    ours = next(row for row in ran if row["way"] == DEFAULTS)
    assert 2 < ours["steps_before"] < MOST_STEPS
    assert ours["tokens_per_s"] == 1024 / ours["step_s"]


def test_rows_of_an_earlier_run_stay_and_predictions_stand_beside() -> None:
    task, device = Task(model="qwen3-0.6b", tokens=64, fields=SMALL), torch.device("cpu")
    chosen = ways()[:2]
    first = measure(task, device, chosen[:1], 1, lambda body: None)["ways"]
    predicted = [{"way": chosen[1].name, "predicted_s": 0.5, "predicted_device_bytes": 7}]
    rows = measure(task, device, chosen, 1, lambda body: None, done=first, predicted=predicted)["ways"]
    assert rows[0] is first[0]
    assert [row["way"] for row in rows] == [way.name for way in chosen]
    assert (rows[1]["predicted_s"], rows[1]["predicted_device_bytes"]) == (0.5, 7)


def test_the_best_flag_takes_no_more_memory() -> None:
    def row(way: str, seconds: float | None, nbytes: int) -> dict[str, Any]:
        return {"way": way, "step_s": seconds, "peak_device_bytes": nbytes}

    rows = [row("keep", 1.0, 9), row("checkpointing", 2.0, 3), row("attention", 1.5, 5), row("memo", 1.1, 4)]
    assert best_flag_s(row("memo, defaults", 1.2, 5), rows) == 1.5
    assert best_flag_s(row("memo, defaults", 1.2, 2), rows) is None
    assert best_flag_s(row("memo, defaults", 1.2, 9), [*rows, {"way": "failed", "failed": "why"}]) == 1.0


def test_flops_count_the_products_and_half_of_the_scores() -> None:
    model = Task(model="qwen3-0.6b", tokens=32, fields=SMALL).make(torch.device("cpu"))
    weights = 3 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64) + 32 * 64  # q, k and v, o, the MLP; the head
    assert flops_of_step(model, 32) == 32 * (6 * weights + 6 * 3 * 32 * 32)
    adapted = Task(model="llama-3-8b+lora4", tokens=32, fields=SMALL).make(torch.device("cpu"))
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert flops_of_step(adapted, 32) == 32 * (4 * weights + 6 * adapters + 6 * 3 * 32 * 32)


def test_experts_and_windows_are_not_counted() -> None:
    windows = Task(model="gemma-3-1b", tokens=32, fields={**SMALL, "num_hidden_layers": 6})
    assert flops_of_step(windows.make(torch.device("cpu")), 32) is None


def test_adapters_alone_are_trained() -> None:
    made = Task(model="llama-3-8b+lora4", tokens=32, fields=SMALL).make(torch.device("cpu"))
    assert all("lora" in name for name, parameter in made.named_parameters() if parameter.requires_grad)


def test_an_unknown_model_is_one_line() -> None:
    with pytest.raises(UsageError, match="unknown model 'llama-9'; choose one of llama-3-8b, "):
        Task(model="llama-9", tokens=32).make(torch.device("cpu"))
