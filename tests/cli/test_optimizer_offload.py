"""`--optimizer-offload` of `memo train`, `memo plan` and `memo rehearse`: checkpoints, predictions, refusals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from memo.cli.main import main
from memo.cli.train import _config, configure
from memo.errors import ExitCode
from memo.gpt import preset
from memo.gpt.arithmetic import parameter_count

SMALL = ["--model", "tiny", "--layers", "2", "--hidden", "64", "--heads", "1", "--seq", "64", "--on", "cpu"]
ON_HOST = "--optimizer-offload"
GIB = 1 << 30
PLANNED = ["plan", "--model", "llama3-8b", "--seq", "32k", "--gpu", "h100", "--precision", "bf16"]


def train(*flags: object) -> None:
    assert main(["train", *SMALL, "--offload", "none", *map(str, flags)]) == ExitCode.OK


def tensors(directory: Path, step: int) -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            flat[prefix] = value
        else:
            for key, one in value.items():
                walk(f"{prefix}.{key}", one)

    target = directory / "whole.pt"
    dcp_to_torch_save(directory / f"step-{step:08}", target)
    walk("", torch.load(target, weights_only=True))
    return flat


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind_to_the_same_bits(tmp_path: Path, precision: str) -> None:
    common = ["--precision", precision, "--accumulate", 2]
    straight = tmp_path / "straight"
    train(*common, "--steps", 4, "--checkpoint-dir", straight)
    expected = tensors(straight, 4)
    assert any(name.endswith("exp_avg") for name in expected)
    for name, first, second in (("there", [ON_HOST], []), ("back", [], [ON_HOST])):
        path = tmp_path / name
        train(*common, "--steps", 2, "--checkpoint-dir", path, *first)
        train(*common, "--steps", 4, "--checkpoint-dir", path, "--resume", *second)
        found = tensors(path, 4)
        assert found.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_too_little_host_memory_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("memo.manager.machine.available_host_bytes", lambda **_: 1 << 20)
    metrics, logs = tmp_path / "run.jsonl", tmp_path / "logs"
    given = ["train", *SMALL, ON_HOST, "--metrics", str(metrics), "--tensorboard", str(logs)]
    assert main(given) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memo train: --optimizer-offload takes ")
    assert ", and 1 MiB are free" in line
    assert not metrics.exists()
    assert not logs.exists()


def test_several_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, ON_HOST, "--dp", "2"]) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "--optimizer-offload is for one GPU" in line
    rehearsed = ["rehearse", "--model", "llama3-8b", "--seq", "8k", ON_HOST]
    for more in (["--gpus", "2"], ["--optimizer", "sgd"]):
        assert main([*rehearsed, *more]) == ExitCode.USAGE
        assert "--optimizer-offload is for one GPU and adamw" in capsys.readouterr().err


def test_a_plan_counts_the_copy_the_gradients_and_the_state_and_its_run_carries_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main([*PLANNED, ON_HOST, "--host", "200GiB", "-o", str(path), "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    parameters = parameter_count(preset("llama3-8b"))
    assert found["budgets"]["host_bytes"] == pytest.approx(200 * GIB - 8 * parameters, rel=1e-4)
    # Of gradients those under way, and the largest of a layer.
    assert found["memory"]["uses_bytes"]["gradients"] == GIB + 2 * 4096 * 14336
    assert found["memory"]["uses_bytes"]["optimizer"] == 0
    assert json.loads(path.read_text())["run"]["optimizer_offload"] is True
    parser = argparse.ArgumentParser()
    configure(parser)
    assert _config(parser.parse_args(["--plan", str(path)])).optimizer_offload
    assert main([*PLANNED, ON_HOST]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "on the host, with a copy of the parameters; published runs took several times" in shown


def test_a_rehearsal_has_the_state_on_the_host_and_holds_its_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["rehearse", "--model", "llama3-8b", "--layers", "2", "--seq", "8k", "--gpu", "h100", "--json"]
    found = {}
    for flags in ([], [ON_HOST]):
        assert main([*asked, *flags]) == ExitCode.OK
        found[bool(flags)] = json.loads(capsys.readouterr().out)
    parameters = parameter_count(preset("llama3-8b", layers=2))
    there, here = found[True], found[False]
    assert there["fits"]
    assert there["settled"]
    assert there["optimizer_host_nbytes"] == pytest.approx(8 * parameters, rel=1e-4)
    assert here["static_nbytes"] - there["static_nbytes"] == pytest.approx(4 * parameters, rel=1e-3)
    assert here["host_budget_nbytes"] > there["host_budget_nbytes"]
    assert there["step_s"] > here["step_s"]
    peaks = [max(step["device_peak_nbytes"] for step in one["steps"]) for one in (here, there)]
    assert peaks[1] < peaks[0] - 3.9 * parameters  # both are at the head, before most gradients
