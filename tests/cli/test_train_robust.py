"""Long runs of `memo train` as processes: killed in the middle of a checkpoint, stopped by NaN, short of disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ready_python

SMALL = ["--model", "tiny", "--layers", "2", "--hidden", "64", "--heads", "1", "--seq", "128", "--on", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TRAIN = "import sys; from memo.cli.main import main; sys.exit(main(['train', *sys.argv[1:]]))"
# From its second checkpoint on the disk never finishes.
STUCK = """
import os, time
from memo.gpt.checkpoint import directory
rename = os.rename
def stuck(source, target):
    if "step-00000002" not in str(target):
        open(os.environ["STUCK"], "w").close()
        time.sleep(600)
    rename(source, target)
directory.os.rename = stuck
"""
# The activations of step 4 are NaN.
POISONED = """
import torch
from memo.gpt.train.step import Trainer
step = Trainer.step
def poisoned(self, number, **others):
    hook = None
    if number == 4:
        hook = self.model.tokens.register_forward_hook(lambda module, args, output: output * float("nan"))
    try:
        return step(self, number, **others)
    finally:
        if hook is not None:
            hook.remove()
Trainer.step = poisoned
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i} of a small training text, {i * i}\n" for i in range(2000)))
    return path


def command(*flags: object, before: str = "") -> list[str]:
    return [sys.executable, "-c", before + TRAIN, *map(str, flags)]


def train(*flags: object, before: str = "") -> subprocess.CompletedProcess[str]:
    return ready_python.run(*command(*flags, before=before)[1:], env=ENVIRONMENT)


def losses(metrics: Path) -> dict[int, float | None]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))  # each step once, in order
    return {line["step"]: line["loss"] for line in lines}


def test_kill_9_during_a_background_checkpoint_resumes_from_the_one_before_bit_for_bit(
    text: Path, tmp_path: Path
) -> None:
    flags = [*SMALL, "--data", text, "--steps", 12, "--dropout", 0.1]
    straight = train(*flags, "--metrics", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    run, metrics, marker = tmp_path / "run", tmp_path / "m", tmp_path / "stuck"
    saving = [*flags, "--metrics", metrics, "--checkpoint-dir", run, "--checkpoint-every", 2]
    process = subprocess.Popen(
        command(*saving, before=STUCK), stdout=subprocess.DEVNULL, env={**ENVIRONMENT, "STUCK": str(marker)}
    )
    deadline = time.monotonic() + 200
    # Step 7 ends while the checkpoint of step 4 is still being written: steps do not wait for the disk.
    while not marker.exists() or metrics.read_text().count("\n") < 7:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    names = sorted(path.name for path in run.iterdir())
    assert len(names) == 2
    assert names[0].startswith(".step-")
    assert names[0].endswith(".partial")
    assert names[1] == "step-00000002"
    resumed = train(*saving, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "step-00000002" in resumed.stdout
    assert losses(metrics) == losses(tmp_path / "straight")
    assert not list(run.glob(".*"))


def test_nan_stops_with_its_step_and_the_step_before_saved_or_is_skipped_and_counted(
    text: Path, tmp_path: Path
) -> None:
    flags = [*SMALL, "--data", text, "--steps", 6, "--dropout", 0.1]
    straight = train(*flags, "--metrics", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    stopping = [*flags, "--metrics", tmp_path / "m", "--checkpoint-dir", tmp_path / "run"]
    stopped = train(*stopping, before=POISONED)
    assert stopped.returncode == 1
    assert stopped.stderr.startswith("memo train: step 4: the loss is nan; the weights of step 3 are unchanged")
    assert "step 3 is saved" in stopped.stderr
    assert stopped.stderr.count("\n") == 1
    resumed = train(*stopping, "--resume")  # and without the fault the run is what it would have been
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "m") == losses(tmp_path / "straight")
    skipped = train(*flags, "--metrics", tmp_path / "s", "--on-nan", "skip", before=POISONED)
    assert skipped.returncode == 0, skipped.stderr
    assert "warning  step 4: the loss is nan; its update was skipped" in skipped.stdout
    lines = [json.loads(line) for line in (tmp_path / "s").read_text().splitlines()]
    assert [line.get("skipped_steps", 0) for line in lines] == [0, 0, 0, 1, 1, 1]
    assert lines[3]["loss"] is None
    assert lines[4]["loss"] > 0


def test_a_disk_that_fills_up_is_a_warning_until_the_last_checkpoint(text: Path, tmp_path: Path) -> None:
    failing = """
import errno, os, types
from memo.gpt.checkpoint import directory
count = [0]
def full(*_):
    count[0] += 1
    if count[0] == 1 or os.environ.get("FULL"):
        raise OSError(errno.ENOSPC, "")
directory.os = types.SimpleNamespace(**{**vars(os), "fsync": full})  # of checkpoints alone
"""
    flags = [*SMALL, "--data", text, "--steps", 6, "--checkpoint-every", 2]
    done = train(*flags, "--checkpoint-dir", tmp_path / "run", before=failing)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ENOSPC No space left on device; training goes on") == 1
    assert "step-00000006" in [path.name for path in (tmp_path / "run").iterdir()]
    always = 'import os; os.environ["FULL"] = "1"\n' + failing
    failed = train(*flags, "--checkpoint-dir", tmp_path / "other", before=always)
    assert failed.returncode == 1
    assert "ENOSPC" in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_by_the_clock(text: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--data", text, "--steps", 3, "--checkpoint-dir", tmp_path / "run", "--checkpoint-keep", 9]
    done = train(*flags, "--checkpoint-minutes", 1e-6)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert len(names) >= 2  # of every step that found the writer idle
    assert names[-1] == "step-00000003"
