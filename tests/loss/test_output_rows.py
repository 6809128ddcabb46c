"""The loss over a vocabulary that lies in shards on two ranks, over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parent / "vocabulary_worker.py"


def test_shards_of_the_vocabulary_give_the_loss_and_gradients_of_the_whole() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 2
