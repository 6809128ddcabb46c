"""The embedding's gradient exchanged as rows: the dense exchange's losses and weights, in the bytes of the arithmetic."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch
from ready_ranks import run_ranks

from memo.cli.main import main


def test_two_ranks_have_the_dense_exchanges_bits_in_the_arithmetics_bytes() -> None:
    said = launch(2, "embedding_worker.py", "dp2", "cp2")
    assert "dp2: equal bit for bit" in said
    assert "cp2: equal bit for bit" in said
    assert said.count("dp2: 76056 bytes") == 1, "three steps of (2 - 1) (8 + 192 (4 + 32 x 4))"


@pytest.mark.parallel
def test_four_ranks_are_within_the_bound_of_another_order_and_pairs_of_ranks_have_the_bits() -> None:
    said = launch(4, "embedding_worker.py", "dp4", "dp2_cp2", "dp2_tp2", "dp2_pp2")
    assert said.count("equal within the bound") == 2
    assert said.count("equal bit for bit") == 2
    assert said.count("114120 bytes") == 2, "three steps of (4 - 1) (8 + 96 (4 + 32 x 4))"


@pytest.mark.parallel
def test_three_ranks_are_within_the_bound() -> None:
    assert "dp3: equal within the bound" in launch(3, "embedding_worker.py", "dp3")


SMALL = ["--model", "tiny", "--variant", "llama", "--layers", "2", "--hidden", "64", "--heads", "2", "--on", "cpu"]
SMALL += ["--seq", "32", "--batch", "1", "--steps", "3"]


def trained(*flags: object) -> subprocess.CompletedProcess[str]:
    return run_ranks(2, "-m", "memo.cli.main", "train", *SMALL, *flags, timeout=200)


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def test_train_exchanges_as_the_flag_says_and_says_so(tmp_path: Path) -> None:
    said = {}
    for name in ("dense", "sparse", "auto"):
        done = trained("--dp", 2, "--metrics", tmp_path / name, "--embedding-exchange", name)
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout + done.stderr
        assert losses(tmp_path / name) == losses(tmp_path / "dense")
    assert "embedding gradients" not in said["dense"]
    for name in ("sparse", "auto"):
        assert "embedding gradients: sparse exchange, at most 8.133 KiB a step and rank (dense 64.25 KiB)" in said[name]


def test_train_exchanges_as_the_plan_says(tmp_path: Path) -> None:
    shape = ["--model", "tiny", "--variant", "llama", "--layers", "2", "--hidden", "64", "--heads", "2"]
    step = ["--seq", "4k", "--precision", "fp32", "--embedding-exchange"]
    plan, steps = tmp_path / "plan.json", ["--on", "cpu", "--steps", "2", "--metrics"]
    asked = ["plan", *shape, *step, "sparse", "--gpu", "h100", "--gpus", "2", "--mlp-tiles", "1", "-o", str(plan)]
    assert main(asked) == 0
    train = functools.partial(run_ranks, 2, "-m", "memo.cli.main", "train", timeout=200)
    planned = train("--plan", plan, *steps, tmp_path / "planned")
    alone = train(*shape, *step, "dense", "--dp", 2, *steps, tmp_path / "dense")
    assert (planned.returncode, alone.returncode) == (0, 0), planned.stderr + alone.stderr
    assert losses(tmp_path / "planned") == losses(tmp_path / "dense")
    assert "embedding gradients: sparse exchange" in planned.stdout + planned.stderr


def test_train_refuses_rows_of_a_tied_table_and_auto_says_why_it_is_dense(tmp_path: Path) -> None:
    tied = ("--dp", 2, "--variant", "gpt", "--embedding-exchange")
    refused = trained(*tied, "sparse")
    assert refused.returncode == 2
    assert "--embedding-exchange sparse: the embedding is the output projection, too" in refused.stderr
    done = trained(*tied, "auto")
    assert done.returncode == 0, done.stderr
    assert (
        "embedding gradients: dense exchange, since the embedding is the output projection" in done.stdout + done.stderr
    )
    alone = trained("--tp", 2, "--embedding-exchange", "sparse")
    assert alone.returncode == 2
    assert "no other rank has the embedding's rows; it takes data or context parallelism" in alone.stderr
