"""The loss over a vocabulary that lies in shards on two ranks, over gloo."""

from __future__ import annotations

from pathlib import Path

from ready_ranks import run_ranks

WORKER = Path(__file__).parent / "vocabulary_worker.py"


def test_shards_of_the_vocabulary_give_the_loss_and_gradients_of_the_whole() -> None:
    done = run_ranks(2, WORKER, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 2
