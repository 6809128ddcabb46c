"""Four ranks that share one GPU, over gloo: divided steps against one process, and with memo against without bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

WORKER = Path(__file__).parent.parent / "parallel" / "equality_worker.py"


@pytest.mark.parametrize("layout", ["dp2_tp2_float64", "cp4_llama_float64"])
def test_divided_steps_are_those_of_one_process(layout: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "EQUALITY_DEVICE": "cuda:0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(WORKER), "0", layout],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"equal {layout} within" in done.stdout
