"""Token-wise recompute under FSDP2 and every kind of pipeline schedule; tensor parallel layers fall back. Over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "tokenwise_worker.py"
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-bf16", "tensor", *SCHEDULES])
def test_gradients_are_equal(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(WORKER), kind, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"equal {kind}" in done.stdout
    assert list(tmp_path.iterdir()) == []
