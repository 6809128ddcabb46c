"""Ring attention with torch's flash kernel over NCCL: the attention of the whole sequence, forward and backward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

WORKER = Path(__file__).parent / "ring_worker.py"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_ring_of_gpus_attends_as_one_kernel_does(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, one for each rank")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(WORKER),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == ranks
