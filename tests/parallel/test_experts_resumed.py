"""A mixture of experts goes on from a checkpoint with its experts on other ranks, with memo and without, to the losses."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import run_ranks

# As in test_elastic.py; a choice between two almost equal experts, which rounding may turn, takes more.
BOUND = 1e-4
STEPS, KEPT = 6, 3
# Four experts: on eight ranks, their matrices are sharded by inputs.
RUN = [
    "--model",
    "moe-tiny",
    "--experts",
    4,
    "--seq",
    64,
    "--on",
    "cpu",
    "--warmup",
    2,
    "--global-batch",
    8,
    "--steps",
    STEPS,
]


def trained(ranks: int, metrics: Path, *flags: object) -> list[float]:
    """Losses of the steps of a run by `memo train`."""
    done = run_ranks(ranks, "-m", "memo.cli.main", "train", *RUN, "--metrics", metrics, *flags, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = random.Random(0)
    path.write_text(" ".join(words.choice(["the", "sea", "is", "blue", "and", "wide"]) for _ in range(20_000)))
    return path


@pytest.fixture(scope="module")
def first(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Checkpoint of the third step of two ranks with half of the experts each, and the losses of all steps."""
    folder = tmp_path_factory.mktemp("first")
    saved = ("--checkpoint-dir", folder, "--checkpoint-every", KEPT, "--checkpoint-keep", 9)
    losses = trained(2, folder / "metrics", "--data", data, *saved, "--dp", 2, "--ep", 2)
    return folder / f"step-{KEPT:08d}", losses


OTHERS = [
    pytest.param(1, [], id="one process"),
    pytest.param(2, ["--dp", 2, "--ep", 2, "--offload", "disk", "--alpha", 0.5], id="with memo"),
    pytest.param(4, ["--dp", 4, "--ep", 4], id="a quarter each", marks=pytest.mark.parallel),
    pytest.param(4, ["--dp", 2, "--ep", 2, "--tp", 2], id="tensor parallel", marks=pytest.mark.parallel),
    pytest.param(4, ["--dp", 2, "--ep", 2, "--pp", 2], id="a pipeline", marks=pytest.mark.parallel),
    pytest.param(
        8, ["--dp", 8, "--ep", 4, "--offload", "disk"], id="eight ranks with memo", marks=pytest.mark.parallel
    ),
]


@pytest.mark.parametrize(("ranks", "layout"), OTHERS)
def test_experts_on_other_ranks_go_on_to_the_losses(
    first: tuple[Path, list[float]], data: Path, tmp_path: Path, ranks: int, layout: list[object]
) -> None:
    kept, losses = first
    found = trained(ranks, tmp_path / "metrics", "--data", data, "--resume", kept, *layout)
    if "--alpha" in layout:
        assert found == losses[KEPT:], "the same layout gives the same bits"
    else:
        assert found == pytest.approx(losses[KEPT:], rel=BOUND)
