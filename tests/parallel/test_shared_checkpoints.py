"""Ranks agree on when a checkpoint begins, write it together while they train, and go on from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import torchrun

SMALL = ["--model", "tiny", "--layers", "2", "--hidden", "64", "--heads", "1", "--seq", "128", "--on", "cpu"]
CONSTANT = ["--lr", "1e-3", "--min-lr", "1e-3", "--warmup", "0"]  # the same rates however long the run is


def train(*flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *torchrun(2, "-m"),
            "memo.cli.main",
            "train",
            *SMALL,
            *CONSTANT,
            "--dp",
            "2",
            *map(str, flags),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


@pytest.mark.parallel
def test_by_the_clock_of_the_first_rank_and_resumed_to_the_same_losses(tmp_path: Path) -> None:
    straight = train("--steps", 4, "--metrics", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    run = ("--checkpoint-dir", tmp_path / "run", "--checkpoint-minutes", 1e-6, "--checkpoint-keep", 9)
    first = train("--steps", 2, "--metrics", tmp_path / "m", *run)
    assert first.returncode == 0, first.stderr
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["step-00000001", "step-00000002"]
    meta = json.loads((tmp_path / "run" / names[-1] / "meta.json").read_text())
    assert meta["settings"]["health"]["losses"] == losses(tmp_path / "m")
    resumed = train("--steps", 4, "--resume", "--metrics", tmp_path / "m", *run)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "m") == losses(tmp_path / "straight")
