"""The arm for a million tokens, at eight thousand and on a CPU: everything but the GPU is as it will be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks import gpu_million
from benchmarks.attention_probe import probe_attention
from benchmarks.gpu_million import OURS, Request, choose_depth, measure, plan_within, run
from benchmarks.peers.ways import CHECKPOINTING, OFFLOADED
from memo.gpt import preset
from memo.gpt.model.attention_kernel import Kernel

REQUEST = Request(
    model="tiny",
    heads=None,
    seq=8192,
    depths=(4, 2),
    seconds=1e9,
    host_bytes=256 << 20,
    device_bytes=96 << 20,
    gpu="h200",
)
CPU = torch.device("cpu")


def test_all_ways_take_the_same_step_and_the_plan_is_carried_out() -> None:
    bodies: list[dict[str, Any]] = []
    request = dataclasses.replace(REQUEST, seq=2048, device_bytes=19 << 20)
    result = measure(request, CPU, bodies.append)
    assert [len(body["ways"]) for body in bodies] == [1, 2, 3]
    assert bodies[-1] == result
    assert result["config"]["layers"] == 4
    ours, full, offloaded = result["ways"]
    assert [row["way"] for row in result["ways"]] == [OURS, CHECKPOINTING, OFFLOADED]
    assert full["bit_equal"]
    assert offloaded["bit_equal"]
    assert ours["loss"] == full["loss"] == offloaded["loss"]
    plan = result["plan"]
    assert plan["peak_host_bytes"] > 0  # the budget of the device is too small for everything
    # The short warm-up comes first, at the same length here. A storage goes to one place whole, where plans have fractions:
    # of each layer but the last, which stays.
    storages = (result["config"]["layers"] - 1) * request.seq * 128 * 2
    assert abs(ours["peak_host_bytes"] - plan["peak_host_bytes"]) < storages < plan["peak_host_bytes"]
    assert result["speed_ratio"] > 0


def test_the_depth_is_the_largest_whose_steps_fit() -> None:
    request = Request(seq=1 << 20, depths=(24, 12, 8), seconds=420, host_bytes=1, device_bytes=1, gpu="h200")
    assert choose_depth(request, 3.0) == 24
    assert choose_depth(request, 5.0) == 12
    assert choose_depth(request, 10.0) == 8
    assert choose_depth(request, 1000.0) == 8


def test_one_gpu_gets_a_plan_in_tiles_where_it_needs_them() -> None:
    request = Request(
        seq=1 << 20, depths=(8, 6, 4), seconds=1e9, host_bytes=88 << 30, device_bytes=int(0.92 * (48 << 30)), gpu="h100"
    )
    config, plan = plan_within(request, 1.0)
    assert config.layers == 8
    assert config.mlp_tiles == plan.problem.profile.mlp_tiles > 1


def test_a_depth_without_a_plan_gives_way_to_the_next_shallower(capsys: pytest.CaptureFixture[str]) -> None:
    request = dataclasses.replace(REQUEST, depths=(40, 2), host_bytes=16 << 20)
    config, _ = plan_within(request, 0.0)
    assert config.layers == 2
    assert capsys.readouterr().err.startswith("  40 layers: no plan: ")


def test_no_plan_at_all_is_one_line_and_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_million, "probe_attention", lambda *_: probe_attention(preset("tiny", max_seq=64), *_[1:]))
    bodies: list[dict[str, Any]] = []
    request = dataclasses.replace(REQUEST, device_bytes=1 << 20)
    assert not run(request, CPU, bodies.append)
    told = capsys.readouterr().err.splitlines()
    assert [line[:23] for line in told] == [
        "  4 layers: no plan: wi",
        "  2 layers: no plan: wi",
        "gpu-bench 1m: 2 layers ",
    ]
    assert bodies[-1]["failed"].startswith("2 layers at 8192 tokens: ")


def test_without_a_solver_the_arm_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_million, "no_solver", lambda: "a plan needs pulp, not installed here")
    assert not run(REQUEST, CPU, lambda body: None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "gpu-bench 1m: a plan needs pulp, not installed here; nothing was run"


def test_attention_is_timed_at_the_real_length_by_the_models_kernel() -> None:
    found = probe_attention(preset("tiny", max_seq=256), CPU, torch.float32)
    assert found.tokens == 256
    assert found.kernel == Kernel.FLASH.value
    assert found.seconds > 0
