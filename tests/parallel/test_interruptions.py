"""Runs that are cut off: they end everywhere, soon, and go on from the newest checkpoint, also at another layout."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import SPLITS_BACKWARD, torchrun

pytestmark = pytest.mark.parallel

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
END_WITHIN_S = 30.0

# float32 sums in another order, over some steps of training.
BOUND = 1e-5


def training(data: Path, metrics: Path, *flags: str) -> list[str]:
    """A run of `memo train` on a model of four small layers."""
    model = [
        "--layers",
        "4",
        "--hidden",
        "32",
        "--heads",
        "4",
        "--seq",
        "256",
        "--global-batch",
        "16",
        "--accumulate",
        "4",
    ]
    files = ["--data", str(data), "--metrics", str(metrics), "--eval-every", "6", "--eval-steps", "3"]
    return ["-m", "memo.cli.main", "train", "--on", "cpu", "--warmup", "2", *model, *files, *flags]


def losses(metrics: Path) -> list[float]:
    """By step; every step is there once, in order."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(lines[0]["step"], lines[0]["step"] + len(lines)))
    return [line["loss"] for line in lines]


def evaluations(metrics: Path) -> dict[int, float]:
    """Losses on text held out, by the steps that they follow."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


def finish(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = random.Random(0)
    path.write_text(" ".join(words.choice(["the", "sea", "is", "blue", "and", "wide"]) for _ in range(20_000)))
    return path


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metrics of one process."""
    metrics = tmp_path_factory.mktemp("alone") / "metrics"
    finish([sys.executable, *training(data, metrics, "--steps", "24")])
    return metrics


@pytest.fixture(scope="module")
def uninterrupted(alone: Path) -> list[float]:
    return losses(alone)


def test_a_checkpoint_of_one_layout_goes_on_at_others(
    data: Path, alone: Path, uninterrupted: list[float], tmp_path: Path
) -> None:
    first, kept = tmp_path / "first", str(tmp_path / "kept")
    stop_early = ("--steps", "24", "--checkpoint-dir", kept, "--checkpoint-every", "12", "--checkpoint-keep", "5")
    finish([*torchrun(4), *training(data, first, *stop_early, "--dp", "2", "--tp", "2")])
    assert losses(first) == pytest.approx(uninterrupted, rel=BOUND)
    checkpoint = str(tmp_path / "kept" / "step-00000012")
    pipeline = ["--pp", "2", "--dp", "2"]
    in_a_v = [*pipeline, "--schedule", "zbv" if SPLITS_BACKWARD else "interleaved-1f1b"]
    others = ([*torchrun(4)], pipeline), ([*torchrun(4)], in_a_v), ([sys.executable], [])
    for number, (launcher, layout) in enumerate(others):
        second = tmp_path / f"second{number}"
        finish([*launcher, *training(data, second, "--steps", "24", "--resume", checkpoint, *layout)])
        assert losses(second) == pytest.approx(uninterrupted[12:], rel=BOUND)
        later = {step: loss for step, loss in evaluations(alone).items() if step > 12}
        assert evaluations(second) == pytest.approx(later, rel=BOUND)
        assert list(later) == [18, 24]


def children(parent: int) -> dict[int, int]:
    """Ranks of the processes that torchrun has started, and their ids."""
    found = {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((path / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                environment = (path / "environ").read_bytes().split(b"\0")
                rank = next(int(line[5:]) for line in environment if line.startswith(b"RANK="))
                found[rank] = int(path.name)
    return found


def alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_a_killed_rank_ends_all_and_a_restart_goes_on(data: Path, uninterrupted: list[float], tmp_path: Path) -> None:
    metrics, kept, scratch = tmp_path / "metrics", tmp_path / "kept", tmp_path / "scratch"
    scratch.mkdir()
    run = ["--steps", "24", "--offload", "disk", "--disk", str(scratch), "--dp", "2", "--tp", "2"]
    flags = [*run, "--checkpoint-dir", str(kept), "--checkpoint-every", "3", "--resume"]
    finish([*torchrun(4), *training(data, tmp_path / "undisturbed", *run)])
    victim_step = random.randrange(4, 16)
    with subprocess.Popen(
        [*torchrun(4, "--max-restarts", "1"), *training(data, metrics, *flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    ) as job:
        try:
            wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= victim_step, 120)
            ranks = children(job.pid)
            assert sorted(ranks) == [0, 1, 2, 3]
            os.kill(ranks[3], signal.SIGKILL)
            wait_for(lambda: not any(alive(process) for process in ranks.values()), END_WITHIN_S)
            said, _ = job.communicate(timeout=200)
        finally:
            job.kill()
    assert job.returncode == 0, said
    assert losses(metrics) == losses(tmp_path / "undisturbed"), f"killed after step {victim_step}"
    assert losses(metrics) == pytest.approx(uninterrupted, rel=BOUND)
    assert list(scratch.iterdir()) == []
    assert [path.name for path in kept.iterdir() if path.name.startswith(".")] == []


def wait_for(condition: object, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def test_the_first_rank_that_fails_is_named_by_all(data: Path, tmp_path: Path) -> None:
    """Rank 2 finds the disk directory missing; the others only find rank 2 gone."""
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys\n"
        "from memo.cli.main import main\n"
        f"there = {str(tmp_path)!r}\n"
        "directory = '/nowhere' if os.environ['RANK'] == '2' else there\n"
        "sys.exit(main([*sys.argv[1:], '--offload', 'disk', '--disk', directory]))\n"
    )
    command = [*torchrun(4), str(script), *training(data, tmp_path / "metrics", "--dp", "4", "--steps", "3")[2:]]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
    assert done.returncode != 0
    assert time.monotonic() - begin < 60 + END_WITHIN_S
    told = [line for line in done.stderr.splitlines() if line.startswith("memo train: rank")]
    assert any(line.startswith("memo train: rank 2: ") and "/nowhere" in line for line in told), done.stderr
    assert all("/nowhere" in line for line in told), told
