"""The arm of gpu-bench for unmodified models, on a CPU and small: every way takes the same step, and defaults settle."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from benchmarks.gpu_defaults import DEFAULTS, MOST_STEPS, Task, measure, ways
from memo.errors import UsageError

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 8,
}


@pytest.mark.parametrize("model", ["llama-3-8b+lora4", "qwen3-0.6b"])
def test_every_way_takes_the_same_step_and_defaults_settle(model: str) -> None:
    bodies: list[dict[str, Any]] = []
    task = Task(model=model, tokens=1024, fields=SMALL)
    body = measure(task, torch.device("cpu"), ways(), 1, lambda so_far: bodies.append(copy.deepcopy(so_far)))
    assert [len(each["ways"]) for each in bodies] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert ["gradient_difference" in each["ways"][-1] for each in bodies] == [False, True] * 5  # which takes longest
    assert [row["failed"] for row in body["ways"]] == [None] * 5
    assert {row["gradient_difference"] for row in body["ways"]} == {0.0}
    losses = {row["loss"] for row in body["ways"]}
    assert len(losses) == 1
    assert abs(losses.pop() - math.log(SMALL["vocab_size"])) < 1
    ours = body["ways"][-1]
    assert ours["way"] == DEFAULTS
    assert 2 < ours["steps_before"] < MOST_STEPS


def test_adapters_alone_are_trained() -> None:
    made = Task(model="llama-3-8b+lora4", tokens=32, fields=SMALL).make(torch.device("cpu"))
    assert all("lora" in name for name, parameter in made.named_parameters() if parameter.requires_grad)


def test_an_unknown_model_is_one_line() -> None:
    with pytest.raises(UsageError, match="unknown model 'llama-9'; choose one of llama-3-8b, "):
        Task(model="llama-9", tokens=32).make(torch.device("cpu"))
