"""`memo train --resume` at another `--seq`: which models may, with which rotary positions, and what is said."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ready_python

SIZE = ["--model", "tiny", "--layers", "2", "--hidden", "64", "--heads", "2", "--on", "cpu"]
STEADY = ["--warmup", "0", "--lr", "3e-4", "--min-lr", "3e-4"]  # the same rate in a run of any length
LLAMA = [*SIZE, *STEADY, "--variant", "llama"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i} of a small training text, {i * i}\n" for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def short(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a run at 64 tokens."""
    runs = tmp_path_factory.mktemp("runs") / "short"
    done = memo_train(*LLAMA, "--data", text, "--seq", 64, "--steps", 2, "--checkpoint-dir", runs)
    assert done.returncode == 0, done.stderr
    return runs / "step-00000002"


def memo_train(*flags: object) -> subprocess.CompletedProcess[str]:
    command = ["-m", "memo.cli.main", "train", *map(str, flags)]
    return ready_python.run(*command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=None)


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def model_of(checkpoint: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((checkpoint / "meta.json").read_text())["settings"]
    return {"seq": settings["seq"], **settings["model"]}


def test_a_rotary_model_grows_and_later_runs_keep_its_positions(text: Path, short: Path, tmp_path: Path) -> None:
    grown = [*LLAMA, "--data", text, "--seq", 256, "--resume", short, "--rope-scaling", "yarn:4"]
    first = memo_train(*grown, "--steps", 4, "--checkpoint-dir", tmp_path / "a", "--metrics", tmp_path / "a.jsonl")
    assert first.returncode == 0, first.stderr
    said = "context  64 tokens (rope theta 10000) in the checkpoint, 256 tokens (rope theta 10000, yarn:4) now"
    assert said in first.stdout
    assert "never trained" not in first.stdout
    found = model_of(tmp_path / "a" / "step-00000004")
    assert (found["seq"], found["rope_scaling"]) == (256, {"kind": "yarn", "factor": 4.0, "original_seq": 64})

    # Without the flag the positions are the checkpoint's, and the losses those of a run that went on.
    again = [*LLAMA, "--data", text, "--seq", 256, "--checkpoint-dir", tmp_path / "a"]
    second = memo_train(*again, "--resume", "--steps", 5, "--metrics", tmp_path / "a.jsonl")
    assert second.returncode == 0, second.stderr
    assert "context " not in second.stdout
    straight = memo_train(*grown, "--steps", 5, "--checkpoint-dir", tmp_path / "b", "--metrics", tmp_path / "b.jsonl")
    assert straight.returncode == 0, straight.stderr
    assert losses(tmp_path / "a.jsonl") == losses(tmp_path / "b.jsonl")

    # Another length with the same positions, shorter than before.
    shorter = [*LLAMA, "--data", text, "--seq", 128, "--checkpoint-dir", tmp_path / "a"]
    assert memo_train(*shorter, "--resume", "--steps", 6).returncode == 0
    assert model_of(tmp_path / "a" / "step-00000006")["rope_scaling"] == found["rope_scaling"]


def test_positions_change_the_loss_and_longer_ones_untouched_are_warned_of(
    text: Path, short: Path, tmp_path: Path
) -> None:
    found = {}
    ways = {"none": (), "theta": ("--rope-theta", 5e5), "ntk": ("--rope-scaling", "ntk:4")}
    for name, flags in ways.items():
        metrics = tmp_path / f"{name}.jsonl"
        grown = [*LLAMA, "--data", text, "--seq", 256, "--resume", short, "--steps", 3, "--metrics", metrics]
        done = memo_train(*grown, *flags)
        assert done.returncode == 0, done.stderr
        assert ("positions from 64 on were never trained" in done.stdout) == (name == "none")
        found[name] = losses(metrics)[-1]
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("flags", [("--rope-theta", 5e5), ("--rope-scaling", "yarn:2")])
def test_learned_positions_are_refused_in_one_line(text: Path, tmp_path: Path, flags: tuple[object, ...]) -> None:
    learned = [*SIZE, *STEADY, "--data", text, "--checkpoint-dir", tmp_path / "run"]
    refused = memo_train(*learned, "--seq", 64, "--steps", 1, *flags)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert f"{flags[0]} is for rotary positions, and those of tiny are learned" in refused.stderr
    assert memo_train(*learned, "--seq", 64, "--steps", 1).returncode == 0
    refused = memo_train(*learned, "--seq", 128, "--steps", 2, "--resume")
    assert refused.returncode == 1
    assert "has learned positions for 64 tokens, and --seq is 128; only models with rotary" in refused.stderr


@pytest.mark.parametrize("text_of", ["yarn", "yarn:0.5", "cubic:2", "linear:99999"])
def test_a_wrong_scaling_is_refused_before_anything_is_read(text_of: str, tmp_path: Path) -> None:
    refused = memo_train(*LLAMA, "--data", tmp_path / "none", "--seq", 64, "--rope-scaling", text_of)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert f"rope scaling '{text_of}'" in refused.stderr


def test_what_else_differs_is_named_setting_by_setting(text: Path, short: Path, tmp_path: Path) -> None:
    slower = ["--lr", "1e-4", "--min-lr", "1e-4", "--warmup", "0"]
    done = memo_train(*LLAMA, *slower, "--data", text, "--seq", 64, "--resume", short, "--steps", 3)
    assert done.returncode == 0, done.stderr
    assert "warning  --lr was 0.0003 in the checkpoint and is 0.0001 now" in done.stdout
    assert "context " not in done.stdout
