"""A run goes on with fewer, more and other ranks: the same steps, optimizer state and rows, to the uninterrupted losses."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import run_ranks

# float32 sums in another order, over some steps of training: as in test_interruptions.py.
BOUND = 1e-5
STEPS, KEPT = 12, 6
SIZES = ["--layers", "4", "--hidden", "64", "--heads", "16", "--seq", "64", "--on", "cpu", "--variant", "llama"]
LAYOUT = ["--dp", "2", "--tp", "2"]


def train(ranks: int, *flags: object, steps: int = STEPS) -> subprocess.CompletedProcess[str]:
    command = ["-m", "memo.cli.main", "train", *SIZES, "--warmup", "2", "--steps", steps, *flags]
    return run_ranks(ranks, *command, timeout=280)


def finished(ranks: int, *flags: object, steps: int = STEPS) -> str:
    done = train(ranks, *flags, steps=steps)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = random.Random(0)
    path.write_text(" ".join(words.choice(["the", "sea", "is", "blue", "and", "wide"]) for _ in range(20_000)))
    return path


@pytest.fixture(scope="module")
def first(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two times two ranks, twelve sequences a step, with the checkpoint of its sixth step."""
    folder = tmp_path_factory.mktemp("first")
    saved = ("--checkpoint-dir", folder / "kept", "--checkpoint-every", KEPT, "--checkpoint-keep", 9)
    batch = ("--global-batch", 12, "--accumulate", 2)
    finished(4, "--data", data, "--metrics", folder / "metrics", *saved, *batch, *LAYOUT)
    return folder


def checkpoint(first: Path) -> Path:
    return first / "kept" / f"step-{KEPT:08d}"


def test_half_the_ranks_in_a_pipeline_go_on_to_the_losses_and_back_to_the_bits(
    first: Path, data: Path, tmp_path: Path
) -> None:
    """Through a pipeline's checkpoint without a step, the first layout has every bit of its state again."""
    same = ("--data", data, "--resume")
    said = finished(2, *same, checkpoint(first), "--metrics", tmp_path / "pipeline", "--pp", 2)
    assert losses(tmp_path / "pipeline") == pytest.approx(losses(first / "metrics")[KEPT:], rel=BOUND)
    assert "batch    12 sequences a step as in the checkpoint, the same ones: 4 x 3 now, 2 x 6 there" in said
    turned = tmp_path / "turned"
    finished(2, *same, checkpoint(first), "--checkpoint-dir", turned, "--pp", 2, steps=KEPT)
    said = finished(4, *same, turned / checkpoint(first).name, "--metrics", tmp_path / "back", *LAYOUT)
    assert losses(tmp_path / "back") == losses(first / "metrics")[KEPT:]
    assert "the same ones: 2 x 6 now, 4 x 3 there" in said


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (8, ["--dp", "2", "--tp", "2", "--pp", "2"]),
        (3, ["--dp", "3"]),
        (6, ["--dp", "3", "--cp", "2"]),
        (2, ["--dp", "2", "--embedding-exchange", "sparse"]),
        (4, ["--tp", "4"]),
        (1, []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_other_ranks_go_on_to_the_losses(
    first: Path, data: Path, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    finished(ranks, "--data", data, "--resume", checkpoint(first), "--metrics", tmp_path / "metrics", *layout)
    assert losses(tmp_path / "metrics") == pytest.approx(losses(first / "metrics")[KEPT:], rel=BOUND)


@pytest.mark.parallel
def test_whole_documents_are_the_same_rows_with_other_microbatches(data: Path, tmp_path: Path) -> None:
    flags = ("--data", data, "--documents", "whole", "--global-batch", 4)
    documents = tmp_path / "documents.jsonl"
    words = data.read_text().split()
    lines = [" ".join(words[first : first + 60]) for first in range(0, 6000, 60)]
    documents.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    flags = ("--data", documents, "--documents", "whole", "--global-batch", 4)
    kept = tmp_path / "kept"
    finished(
        2,
        *flags,
        "--dp",
        2,
        "--checkpoint-dir",
        kept,
        "--metrics",
        tmp_path / "straight",
        "--checkpoint-every",
        3,
        "--checkpoint-keep",
        9,
        steps=6,
    )
    on = ("--data", documents, "--documents", "whole", "--resume", kept / "step-00000003")
    finished(1, *on, "--accumulate", 4, "--metrics", tmp_path / "one", steps=6)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "straight")[3:], rel=BOUND)


@pytest.mark.parallel
def test_random_state_is_the_steps_own_in_one_layout(data: Path, tmp_path: Path) -> None:
    flags = ("--data", data, "--dp", 2, "--dropout", 0.1)
    kept = ("--checkpoint-dir", tmp_path / "kept", "--checkpoint-every", 3, "--checkpoint-keep", 9)
    finished(2, *flags, *kept, "--metrics", tmp_path / "straight", steps=6)
    finished(2, *flags, "--resume", tmp_path / "kept" / "step-00000003", "--metrics", tmp_path / "on", steps=6)
    assert losses(tmp_path / "on") == losses(tmp_path / "straight")[3:]


def refused(ranks: int, *flags: object) -> str:
    """The line that a rank ends with; every rank says the same thing."""
    done = train(ranks, *flags)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("memo train: ")]
    assert len({line.removeprefix("memo train: rank 0: ") for line in lines}) >= 1
    assert "Traceback" not in done.stderr, done.stderr
    return lines[0]


def test_what_cannot_go_on_is_refused_in_a_line(first: Path, data: Path, tmp_path: Path) -> None:
    on = ("--data", data, "--resume", checkpoint(first))
    assert (
        "--resume: a step of the checkpoint takes 12 sequences, which do not divide over --dp 5; give --global-batch, such "
        "as 10 or 15"
    ) in refused(5, *on, "--dp", 5)
    assert "--tp 3 does not divide the model's 16 heads" in refused(3, *on, "--tp", 3)
    assert "4 layers do not divide over 3 pipeline stages" in refused(3, *on, "--pp", 3)
    assert "is of another model: layers 4 there, 2 here" in refused(2, *on, "--dp", 2, "--layers", 2)
    broken = tmp_path / "step-00000006"
    shutil.copytree(checkpoint(first), broken)
    (broken / "__3_0.distcp").unlink()
    said = refused(2, "--data", data, "--resume", broken, "--dp", 2)
    assert "is damaged: __3_0.distcp has 0 of " in said


def test_another_number_of_sequences_is_said(first: Path, data: Path) -> None:
    said = finished(1, "--data", data, "--resume", checkpoint(first), "--global-batch", 6, steps=KEPT + 1)
    assert "warning  a step took 12 sequences in the checkpoint (2 x 6) and takes 6 now (6 x 1), other ones" in said
