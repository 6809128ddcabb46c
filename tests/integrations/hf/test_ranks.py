"""Trainer under DDP on two ranks with and without memo's callback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.mark.parallel
def test_ranks_of_ddp_train_as_without_memo(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(Path(__file__).parent / "ranks_worker.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("the same on this rank") == 2
