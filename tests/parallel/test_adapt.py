"""Ranks leave a layout that a slowed link makes slow, come back when it is fast again, and go on to the same losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import HERE, torchrun

# float32 sums in another order, over some steps of training: as in test_interruptions.py.
BOUND = 1e-5
WITHIN_S = 300
AFTER = 3
"""Steps after the ranks have come back."""
# A constant learning rate, so that a run's losses do not depend on how many steps were asked for. On a fast link gathers of
# a wide layer's weights take longer than exchanges of its few tokens; on a slow one a layer divided by tp has more of them.
RUN = (
    *(
        [
            "--on",
            "cpu",
            "--layers",
            "1",
            "--hidden",
            "1024",
            "--heads",
            "4",
            "--seq",
            "16",
            "--global-batch",
            "4",
            "--accumulate",
            "1",
        ]
    ),
    *(["--warmup", "2", "--lr", "1e-4", "--min-lr", "1e-4", "--data"]),
    str(HERE.parent.parent / "docs" / "design.md"),
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def steps_of(metrics: Path) -> list[dict[str, object]]:
    """Complete lines; every step is there once, in order."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    return steps


def changes(metrics: Path) -> list[tuple[int, str, str]]:
    """Steps of changes of layout, with both layouts."""
    decisions = [(step["step"], step["adaptation"]) for step in steps_of(metrics) if "adaptation" in step]
    return [(step, one["from"], one["to"]) for step, one in decisions if one["changed"]]


def wait_for(condition: Callable[[], bool], job: subprocess.Popen[str], log: Path) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def test_ranks_leave_tp_for_dp_over_a_slow_link_and_come_back_to_the_losses_of_one_process(tmp_path: Path) -> None:
    metrics, slow, log = (tmp_path / name for name in ("metrics", "slow", "log"))
    slow.touch()
    layout = ("--tp", "4", "--adapt", "--checkpoint-dir", str(tmp_path / "kept"), "--steps", "4000")
    out = ("--metrics", str(metrics), "--trace", str(tmp_path / "trace.rank0.jsonl"))
    command = [*torchrun(4), str(HERE / "throttled_train.py"), str(slow), "train", *RUN, *layout, *out]
    with (
        log.open("w") as said,
        subprocess.Popen(command, stdout=said, stderr=said, text=True, env=ENVIRONMENT) as job,
    ):
        try:
            wait_for(lambda: len(changes(metrics)) == 1, job, log)
            slow.unlink()
            wait_for(lambda: len(changes(metrics)) == 2, job, log)
            back = changes(metrics)[1][0]
            wait_for(lambda: len(steps_of(metrics)) >= back + AFTER, job, log)
            job.send_signal(signal.SIGTERM)
            job.wait(timeout=60)
        finally:
            job.kill()
    (left, *first), (back, dp, tp) = changes(metrics)
    assert first == ["tp 4, 1 x 4", dp] == ["tp 4, 1 x 4", "dp 4, 1 x 4"]
    assert tp in ("tp 4, 1 x 4", "dp 2 x tp 2, 1 x 4")  # groups of two where processors are busy with other work, too
    told = log.read_text()
    assert f"adapt    step {left}: changes from tp 4, 1 x 4 to dp 4, 1 x 4: " in told
    assert f"adapt    step {back}: changes from dp 4, 1 x 4 to {tp}: " in told
    assert told.count("resume   ") == 2
    for restart, step in ((1, left), (2, back)):
        for rank in range(4):
            trace = (tmp_path / f"until-restart{restart}.trace.rank{rank}.jsonl").read_text()
            notes = [line for line in map(json.loads, trace.splitlines()) if line.get("cause") == "adaptation"]
            assert [note["step"] for note in notes if note["message"].startswith("changes from")] == [step]
    losses = [step["loss"] for step in steps_of(metrics)]
    alone = tmp_path / "alone"
    one = [sys.executable, "-m", "memo.cli.main", "train", *RUN, "--offload", "none"]
    one += ["--metrics", str(alone), "--steps", str(len(losses))]
    done = subprocess.run(one, capture_output=True, text=True, timeout=200, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert losses == pytest.approx([step["loss"] for step in steps_of(alone)], rel=BOUND)
