"""Plans for schedules that give a rank two stages: made while training, and carried out from one made beforehand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import SCHEDULES, launch, torchrun


def test_a_rank_of_two_stages_keeps_what_its_turns_leave_room_for() -> None:
    said = launch(2, "chunks_worker.py", timeout_s=600)
    for schedule in SCHEDULES:
        if schedule.default_chunks > 1:
            assert f"\n{schedule}: planned by turns" in said


@pytest.mark.parallel
def test_ranks_of_three_chunks_train_as_one_process_does(tmp_path: Path) -> None:
    flags = ["--on", "cpu", "--layers", "6", "--hidden", "32", "--heads", "4", "--seq", "128", "--steps", "3"]
    flags += ["--global-batch", "4", "--accumulate", "4", "--warmup", "1"]
    chunks = ["--pp", "2", "--schedule", "interleaved-1f1b", "--chunks", "3"]
    losses = []
    for launcher, layout in ([sys.executable], []), (torchrun(2), chunks):
        metrics = tmp_path / f"{len(losses)}"
        command = [*launcher, "-m", "memo.cli.main", "train", *flags, *layout, "--metrics", str(metrics)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # float32 sums in another order
    assert len(set(losses[0])) == 3
